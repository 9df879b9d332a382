"""docs/cost_model.md names functions and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cost_model.md").read_text()
FILES = [*(ROOT / "src/mics_dtensor/plan").glob("*.py"), ROOT / "src/mics_dtensor/train/tracing.py"]
PLAN = "\n".join(file.read_text() for file in FILES)
TESTS = "\n".join(file.read_text() for file in (ROOT / "tests").glob("*/test_plan*.py"))


def rows() -> list[list[str]]:
    found = re.findall(r"^\| ([CFTMU]\d) \| (.*) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    return [list(row) for row in found]


def test_every_equation_has_its_function_and_its_test() -> None:
    assert len(rows()) == 38
    for name, _, functions, tests in rows():
        for function in re.findall(r"`([\w.]+)`", functions):
            last = function.rpartition(".")[2]
            assert f"def {last}(" in PLAN, (name, function)
        named = re.findall(r"`(test_\w+)`", tests)
        assert named or "`test_plan_memory.py`" in tests, name
        for test in named:
            assert f"def {test}(" in TESTS, (name, test)


def test_every_equation_is_named_where_it_is_computed() -> None:
    said = set(re.findall(r"\(([CFTMU]\d)\)", PLAN))
    assert said == {name for name, *_ in rows()}

"""docs/cost_model.md names functions and tests that exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mics_dtensor.plan.cluster import preset_of_cluster, presets
from mics_dtensor.plan.report import SOURCES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cost_model.md").read_text()
FILES = [*(ROOT / "src/mics_dtensor/plan").glob("*.py"), ROOT / "src/mics_dtensor/train/tracing.py"]
PLAN = "\n".join(file.read_text() for file in FILES)
TESTS = "\n".join(file.read_text() for file in (ROOT / "tests").glob("*/test_plan*.py"))


def rows() -> list[list[str]]:
    found = re.findall(r"^\| ([CFTMU]\d+) \| (.*) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    return [list(row) for row in found]


def test_every_equation_has_its_function_and_its_test() -> None:
    assert len(rows()) == 41
    for name, _, functions, tests in rows():
        for function in re.findall(r"`([\w.]+)`", functions):
            last = function.rpartition(".")[2]
            assert f"def {last}(" in PLAN, (name, function)
        named = re.findall(r"`(test_\w+)`", tests)
        assert named or "`test_plan_memory.py`" in tests, name
        for test in named:
            assert f"def {test}(" in TESTS, (name, test)


def test_every_equation_is_named_where_it_is_computed() -> None:
    said = set(re.findall(r"\(([CFTMU]\d+)\)", PLAN))
    assert said == {name for name, *_ in rows()}


def sources(read: Any) -> Iterator[str]:
    """The tags of every `source` in the tables of a preset."""
    for name, value in read.items():
        if isinstance(value, dict):
            yield from sources(value)
        elif name == "source":
            yield from value.split(", ")


def test_every_source_of_a_preset_is_in_the_key_and_no_other() -> None:
    section = PAGE.partition(f"\n## {SOURCES.rpartition('#')[2].title()}\n")[2]
    key = dict(re.findall(r"^\| (\w+) \| (.+?) \| .*\|$", section, flags=re.MULTILINE))
    assert key.pop("source") == "what"
    assert set(sources(presets())) == set(key)
    published = (ROOT / "benchmarks" / "published" / "sources.md").read_text()
    collected = set(re.findall(r"\bS\d+\b", published))
    assert set(key) - {"assumed"} <= collected
    runs = tomllib.loads((ROOT / "benchmarks" / "published" / "runs.toml").read_text())
    named = {tag for its in _named(runs) for tag in re.findall(r"\bS\d+\b", its)}
    assert named
    assert named <= collected


def _named(read: Any) -> Iterator[str]:
    """Every `source` at any depth."""
    if isinstance(read, list):
        for each in read:
            yield from _named(each)
    elif isinstance(read, dict):
        yield from (str(value) for name, value in read.items() if name == "source")
        for value in read.values():
            yield from _named(value)


def test_the_source_of_a_line_rate_is_told() -> None:
    told = {name: source for name, _, _, source in preset_of_cluster("p3dn").constants()}
    assert told["bandwidth out of a node"].startswith("100 Gbit/s (assumed) x 0.636 (S34, S37)")

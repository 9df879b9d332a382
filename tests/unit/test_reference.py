"""docs/configuration.md is what the code says."""

from pathlib import Path

from mics_dtensor.train.config import config_keys
from mics_dtensor.train.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), (
        "python -m mics_dtensor.train.reference > docs/configuration.md"
    )


def test_every_key_has_a_row() -> None:
    for name in config_keys():
        table, _, last = name.rpartition(".")
        section = reference().split(f"## `[{table}]`", 1)[1].split("\n## ", 1)[0]
        assert f"| `{last}` |" in section


def test_types_are_told_in_words() -> None:
    assert "| `module_fqns_per_model_part` | a list of lists of strings |" in reference()
    assert "| `steps` | a whole number (1 or more), in steps |" in reference()

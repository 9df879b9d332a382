"""What the README says of the code is true of the code."""

import re
from pathlib import Path

from mics_dtensor.train.config import config_keys

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MECHANISM = ("collectives", "apply", "accumulate", "boundary", "bucket", "gradient", "agreement")


def test_the_length_of_the_mechanism() -> None:
    files = [ROOT / "src" / "mics_dtensor" / f"{name}.py" for name in MECHANISM]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert f"The mechanism is {lines:,} lines" in README


def test_every_key_of_mics_is_in_its_table() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert table == {name.removeprefix("mics.") for name in config_keys() if "mics." in name}


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)", README)
    assert [name for name in named if not (ROOT / name).exists()] == []

"""What the README says of the code is true of the code."""

import re
from difflib import SequenceMatcher
from pathlib import Path

from mics_dtensor.train.config import config_keys

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MECHANISM = (
    "collectives",
    "gloo",
    "apply",
    "accumulate",
    "boundary",
    "bucket",
    "gradient",
    "agreement",
)


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


def test_the_three_lines_are_the_difference_between_two_examples() -> None:
    plain, mics = (
        (ROOT / "examples" / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("00_fsdp2.py", "01_add_to_fsdp2.py")
    )
    stripped = ([line.strip() for line in its] for its in (plain, mics))
    shown = []
    for hunk in SequenceMatcher(None, *stripped, autojunk=False).get_grouped_opcodes(1):
        for kind, _, _, start, end in hunk:
            assert kind in ("equal", "insert")
            shown += [("+" if kind == "insert" else " ") + line for line in mics[start:end]]
    shown_in_readme = README[README.index("```diff\n") + 8 :].split("\n```", 1)[0]
    assert shown_in_readme.splitlines() == [line.rstrip() for line in shown]
    assert sum("#" in line and line[-1] in "123" for line in shown) == 3

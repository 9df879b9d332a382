"""docs/troubleshooting.md quotes messages that the source really has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^#### `(.*)`$", PAGE, flags=re.MULTILINE)


def texts(tree: ast.AST) -> list[str]:
    """Every string of a file, `...` where a value goes in."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values]
            found.append("".join(parts))
    return found


SAID = [
    text
    for file in (ROOT / "src").rglob("*.py")
    for text in texts(ast.parse(file.read_text(encoding="utf-8")))
]


def occurs(quoted: str) -> bool:
    """Whether one string of the source says this, values (`...`) apart."""
    wanted = re.compile(".*?".join(map(re.escape, quoted.split("..."))), flags=re.DOTALL)
    return any(wanted.search(text) for text in SAID)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_message_is_in_the_source(quoted: str) -> None:
    assert occurs(quoted), quoted


def test_a_message_that_nobody_raises_is_seen() -> None:
    assert len(QUOTED) > 50
    assert not occurs("the flux capacitor is cold")
    assert not occurs("micro-steps were announced, but nobody ... ran")


def test_no_message_is_told_twice() -> None:
    assert sorted(set(QUOTED)) == sorted(QUOTED)

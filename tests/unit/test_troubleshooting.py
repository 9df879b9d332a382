"""docs/troubleshooting.md quotes messages that the source really has."""

import ast

import pytest

from scripts.messages import SOURCE, by_file, page, quoted, says, texts

SAID = [
    text
    for file in SOURCE.rglob("*.py")
    for text in texts(ast.parse(file.read_text(encoding="utf-8")))
]


def occurs(piece: str) -> bool:
    return any(says(text, piece) for text in SAID)


@pytest.mark.parametrize("piece", quoted())
def test_the_message_is_in_the_source(piece: str) -> None:
    assert occurs(piece), piece


def test_a_message_that_nobody_raises_is_seen() -> None:
    assert len(quoted()) > 50
    assert not occurs("the flux capacitor is cold")
    assert not occurs("micro-steps were announced, but nobody ... ran")


def test_no_message_is_told_twice() -> None:
    assert sorted(set(quoted())) == sorted(quoted())


def test_the_list_has_every_message_and_links_those_that_are_told() -> None:
    listed = page([f"anchor-{number}" for number in range(len(quoted()))])
    assert listed.count("\n* **") == sum(len(messages) for messages in by_file().values())
    assert listed.count("what to do") > 50
    assert "ConfigError" in {error for messages in by_file().values() for error, _ in messages}

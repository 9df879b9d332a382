"""English text that every Python carries: the language reference behind `help("topics")`."""

from __future__ import annotations

import random
import re

CHARS_PER_DOCUMENT = 2000
HELD_OUT_EVERY = 20
"""One document in so many is for validation, and no training reads it."""


def python_docs() -> list[str]:
    """Documents of about `CHARS_PER_DOCUMENT` characters, in an order that mixes the topics.

    The same list in every process of one Python version: ranks take different parts of it. From
    `pydoc_data.topics`, 465,000 characters in CPython 3.11.
    """
    from pydoc_data.topics import topics

    documents = [document for topic in sorted(topics) for document in _documents(topics[topic])]
    # Each data-parallel rank reads a contiguous part: without this, one rank would see nothing but
    # the data model and another nothing but the debugger.
    random.Random(0).shuffle(documents)
    return documents


def training_docs() -> list[str]:
    """What the data set "python_docs" holds."""
    held_out = set(validation_docs())  # by text: topics repeat each other
    return [document for document in python_docs() if document not in held_out]


def validation_docs() -> list[str]:
    """What the data set "python_docs_validation" holds: the others."""
    return python_docs()[::HELD_OUT_EVERY]


def _documents(topic: str) -> list[str]:
    """`topic` cut at blank lines, nothing left out."""
    documents = [""]
    for paragraph in re.split(r"(?<=\n\n)(?=\S)", topic):
        if documents[-1] and len(documents[-1]) + len(paragraph) > CHARS_PER_DOCUMENT:
            documents.append("")
        documents[-1] += paragraph
    return documents

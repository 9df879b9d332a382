"""English text that every Python carries: the language reference behind `help("topics")`."""

from __future__ import annotations

import random
import re

CHARS_PER_DOCUMENT = 2000


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


def _documents(topic: str) -> list[str]:
    """`topic` cut at blank lines, nothing left out."""
    documents = [""]
    for paragraph in re.split(r"(?<=\n\n)(?=\S)", topic):
        if documents[-1] and len(documents[-1]) + len(paragraph) > CHARS_PER_DOCUMENT:
            documents.append("")
        documents[-1] += paragraph
    return documents

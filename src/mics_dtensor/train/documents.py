"""The documents of a local file: each line of JSON, line or paragraph of text, row of Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mics_dtensor.errors import ConfigError

# The reader of Hugging Face `datasets` for each kind of file.
READERS = {".jsonl": "json", ".txt": "text", ".parquet": "parquet"}


def load(path: str) -> Any:
    """A map-style data set, memory-mapped from the cache of `datasets`, so a file may be large.

    Raises ConfigError, with the line, where a document is no string: `datasets` would hand on what
    it makes of it.
    """
    from datasets import Dataset, Value, load_dataset

    strings = (Value("string"), Value("large_string"))

    kind = READERS[Path(path).suffix]
    options: dict[str, Any] = {}
    if kind == "text":
        options["sample_by"] = "paragraph" if _has_paragraphs(Path(path)) else "line"
    elif kind == "parquet":
        options["columns"] = ["text"]
    try:
        read = load_dataset(kind, data_files=path, split="train", **options)
    except Exception:  # whatever its readers raise: of a fault of the file we know the line
        _refuse_faults(path)
        raise
    if read.features.get("text") in strings and not read.data.column("text").null_count:
        return read
    _refuse_faults(path)
    # Strings that all look like times are read as times.
    return Dataset.from_generator(_records, gen_kwargs={"path": path}, split="train")


def of_file(path: Path, given: str) -> Iterator[str]:
    """The documents of a local file from its beginning, each held against what is asked of it."""
    if path.suffix == ".parquet":
        yield from _documents_of_parquet(path, given)
        return
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".txt":
                yield from _documents_of_text(file, by_paragraph=_has_paragraphs(path))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document_of_json(line, f"{given}, line {number},")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{given} is not UTF-8 text ({error}); convert it first") from None


def _has_paragraphs(path: Path) -> bool:
    """Whether a blank line stands anywhere in a text file: then those separate its documents."""
    with path.open(encoding="utf-8") as file:
        file.readline()
        return any(line == "\n" for line in file)


def _documents_of_text(lines: Iterable[str], *, by_paragraph: bool) -> Iterator[str]:
    """One a paragraph, or else one a line."""
    document = ""
    for line in lines:
        document += line
        if document.strip() and (line == "\n" or not by_paragraph):
            yield document
            document = ""
    if document.strip():
        yield document


def _document_of_json(line: str, given: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{given} is not JSON ({error}); each line must be an object with a string "text"'
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ConfigError(f'{given} is not an object with a string "text", as each line must be')
    return str(record["text"])


def _documents_of_parquet(path: Path, given: str) -> Iterator[str]:
    import pyarrow as arrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"{given} is not a Parquet file ({error})") from None
    columns = file.schema_arrow.names
    if "text" not in columns:
        raise ConfigError(f'{given} has the columns {columns}; one of strings, "text", is needed')
    for batch in file.iter_batches(columns=["text"]):
        for document in batch.column(0).to_pylist():
            if not isinstance(document, str):
                raise ConfigError(f'{given} holds {document!r} in "text", which must be a string')
            yield document


def _refuse_faults(path: str) -> None:
    """Raise ConfigError at the first document that is none."""
    for _ in of_file(Path(path), f"the file {path}"):
        pass


def _records(path: str) -> Iterator[dict[str, str]]:
    for document in of_file(Path(path), f"the file {path}"):
        yield {"text": document}

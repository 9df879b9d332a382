"""A file of one JSON object a line, which grows by whole lines or not at all."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from errno import ENOSPC
from os import SEEK_END, strerror
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Write one line behind the others; where the disk does not take it, say so and go on.

    The folder is made if need be. A run is worth more than a line about it.
    """
    data = json.dumps(line).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, data)
    except OSError as error:
        logger.warning("a line for %s is lost: %s", path, error.strerror)


def _write(path: Path, data: bytes) -> None:
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, SEEK_END)
        if end:
            file.seek(-1, SEEK_END)
            if file.read(1) != b"\n":  # a writer was killed within its line
                data = b"\n" + data
        try:
            if file.write(data) < len(data):
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError:
            file.truncate(end)
            raise

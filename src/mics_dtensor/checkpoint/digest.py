"""The digest of a file's bytes, by which it is known as what was written. Pure, no torch."""

from __future__ import annotations

import zlib
from hashlib import sha256
from typing import Any

PIECE_BYTES = 4 << 20  # of a file at a time, read and hashed


class Digest:
    """CRC-32, as of a zip file; its text is "crc32:" and eight digits. Fed with what comes.

    Against a disk or a wire that errs; it is no seal, which would be slower to compute.
    `kind` is "sha256" for what manifests of schema 1 hold.
    """

    def __init__(self, kind: str = "crc32") -> None:
        self._kind, self._crc32 = kind, 0
        self._sha256 = sha256() if kind == "sha256" else None

    def update(self, data: Any) -> None:
        """The next bytes. Lets other threads run."""
        if self._sha256 is not None:
            self._sha256.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def __str__(self) -> str:
        its = f"{self._crc32:08x}" if self._sha256 is None else self._sha256.hexdigest()
        return f"{self._kind}:{its}"

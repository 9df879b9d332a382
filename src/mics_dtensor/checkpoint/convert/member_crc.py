"""The CRC-32 that torch.save's zip files carry for each member, which torch.load does not read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile, ZipFile, is_zipfile

from mics_dtensor.checkpoint.digest import PIECE_BYTES
from mics_dtensor.errors import CheckpointError


def refuse_damaged(files: Iterable[Path]) -> None:
    """Reads `files` to the last byte; CheckpointError for the first member that is not as written.

    A file of before torch 1.6 is no zip file and carries nothing to check by; nor does one that was
    saved with torch.serialization.set_crc32_options(False), which writes zeros.
    """
    for file in files:
        try:
            member = _damaged_member(file) if is_zipfile(file) else None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if member is not None:
            raise CheckpointError(
                f"{file}: {member} is not what torch.save wrote (its CRC-32 is another), and "
                "nothing was converted; copy the file again from where it was written, or take an "
                "earlier checkpoint"
            )


def _damaged_member(path: Path) -> str | None:
    with ZipFile(path) as whole:
        for member in whole.infolist():
            if member.CRC == 0:
                continue
            try:
                with whole.open(member) as content:
                    while content.read(PIECE_BYTES):  # zipfile compares at the end of the member
                        pass
            except (BadZipFile, EOFError, zlib.error):
                return member.filename
    return None

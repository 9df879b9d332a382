"""What a rank holds while a checkpoint is loaded: its files as bytes, and parts that came."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import RawIOBase
from typing import IO, Any, cast

import torch

from mics_dtensor.checkpoint.routing import Part
from mics_dtensor.upstream import tensor_in_place


class Held:
    """What this rank has: files that it read, and parts that came. `of` a part: its bytes, 1-D."""

    def __init__(self, files: Mapping[str, memoryview]) -> None:
        self.files, self.arrived = files, dict[Part, torch.Tensor]()
        self._last: tuple[str, int] | None = None
        self._value = torch.empty(0)

    def of(self, part: Part) -> torch.Tensor:
        """uint8."""
        if part in self.arrived:
            return self.arrived[part]
        view = self.files[part.file][part.start : part.start + part.length]
        if not part.is_tensor:
            return torch.frombuffer(view, dtype=torch.uint8)
        if self._last != (part.file, part.start):  # parts of a value follow each other
            self._value = value_of(view)
            self._last = part.file, part.start
        box = tuple(slice(at, at + n) for at, n in zip(part.offsets, part.lengths, strict=True))
        return self._value[box].contiguous().view(-1).view(torch.uint8)


def value_of(view: memoryview) -> torch.Tensor:
    """The tensor that torch.save has written to `view`, in its memory where that can be."""
    file = cast("IO[bytes]", Viewed(view))
    if (tensor := tensor_in_place(file, view)) is not None:
        return tensor
    file.seek(0)
    return cast("torch.Tensor", torch.load(file, map_location="cpu", weights_only=True))


class Viewed(RawIOBase):
    """Bytes as a file that is read into place; BytesIO would copy all of them first."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        """For torch.load, as all here."""
        return True

    def seekable(self) -> bool:
        """So it is."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """To `offset` from the beginning, from here or from the end."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """How many bytes there were."""
        into = memoryview(buffer).cast("B")
        part = self._view[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

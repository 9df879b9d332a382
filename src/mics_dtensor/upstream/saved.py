"""A tensor that torch.save has written, where it lies."""

from __future__ import annotations

import sys
from typing import IO, Any

import torch
from torch.serialization import skip_data

STORAGE = "data/0"


def tensor_in_place(file: IO[bytes], view: memoryview) -> torch.Tensor | None:
    """The one tensor of `file`, in the memory of `view`, which holds the same bytes.

    None where it cannot lie there: of another byte order, not at a multiple of its itemsize, or
    without a storage of its own.
    """
    file.seek(0)
    with skip_data():
        like = torch.load(file, map_location="cpu", weights_only=True)
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)
    if type(like) is not torch.Tensor or not like.numel() or not reader.has_record(STORAGE):
        return None
    if reader.get_record("byteorder").decode() != sys.byteorder:
        return None
    start, num_bytes = reader.get_record_offset(STORAGE), like.untyped_storage().nbytes()
    storage = torch.frombuffer(view[start : start + num_bytes], dtype=torch.uint8)
    if storage.data_ptr() % like.element_size():
        return None
    return storage.view(like.dtype).as_strided(like.size(), like.stride(), like.storage_offset())

"""A part of an optimizer state, as torch.distributed.checkpoint (DCP) saves and loads it.

A tensor subclass, since DCP plans by asking the values of a state dict, through three hooks
(torch/distributed/_checkpointable.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The flat range [start, end) of a contiguous tensor as boxes, in flat order.

    At most 2 * dims - 1: whole rows in the middle, and what is left of a row at either end. Pure.
    """
    shape = tuple(shape)
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), end // inner  # whole rows: [first, last)
    if first > last:  # inside one row
        row = last
        for offsets, sizes in boxes_of(shape[1:], start - row * inner, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        return
    if start % inner:
        for offsets, sizes in boxes_of(shape[1:], start % inner, inner):
            yield (first - 1, *offsets), (1, *sizes)
    if last > first:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if end % inner:
        for offsets, sizes in boxes_of(shape[1:], 0, end % inner):
            yield (last, *offsets), (1, *sizes)


class Piece(torch.Tensor):
    """A flat range of a shard; of the shape of the whole tensor, of which it has `boxes`.

    DCP writes its boxes and fills them from whatever layout was saved, without communication. No
    arithmetic: `flat` has the numbers of this rank.
    """

    flat: torch.Tensor
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, flat: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> Piece:
        """Of a tensor of `shape` the `boxes`, end to end in `flat` (1-D)."""
        piece: Piece = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=flat.dtype, device=flat.device
        )
        piece.flat, piece.boxes = flat, tuple(boxes)
        return piece

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Piece(of {tuple(self.shape)}, {self.dtype}, boxes={self.boxes})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the numbers: savers tell by it whether a cached piece is current."""
        return self.flat.untyped_storage()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.flat.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for offsets, sizes in self.boxes:
            if torch.Size(offsets) == index.offset:
                return self.flat[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)
        raise ValueError(f"{index.fqn}: no box at {index.offset} among {self.boxes}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copies, which savers make; nothing else."""
        aten = torch.ops.aten
        copies = (
            aten.detach.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.alias.default,
        )
        if func in copies:
            options = {k: v for k, v in (kwargs or {}).items() if k != "memory_format"}
            its = args[0]
            return cls.of(func(its.flat, *args[1:], **options), its.shape, its.boxes)
        if func is aten.new_empty.default:  # asynchronous saving then sets the attributes
            its = args[0]
            return cls.of(
                its.flat.new_empty(its.flat.shape, **(kwargs or {})), its.shape, its.boxes
            )
        if func is aten.copy_.default and isinstance(args[1], Piece):
            args[0].flat.copy_(args[1].flat)
            return args[0]
        raise NotImplementedError(
            f"{func} on {args[0]!r}, which is one rank's part of an optimizer state: save and load "
            "it with torch.distributed.checkpoint, or read .flat"
        )

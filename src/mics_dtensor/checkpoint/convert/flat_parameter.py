"""A parameter in pieces of the flat tensors that ZeRO keeps, one tensor a rank and sub-group.

ZeRO-3 and MiCS cut every parameter by itself: rank r of n holds elements [r * k, (r + 1) * k) with
k = ceil(numel / n), the last piece padded, and a rank's pieces of a sub-group lie one after the
other. ZeRO-1 and 2 lay whole parameters one after the other and cut the sum; which piece lies where
is written in the files (`param_slice_mappings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mics_dtensor.errors import CheckpointError

FlatTensor = Callable[[int, int], torch.Tensor]
"""The flat tensor of (rank, sub-group)."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flat tensor of a rank and sub-group."""

    rank: int
    sub_group: int
    start: int
    numel: int


@dataclass(frozen=True)
class FlatParameter:
    """A parameter, the option group of the optimizer that it is in, and where its elements lie."""

    name: str
    shape: torch.Size
    sub_group: int
    pieces: tuple[Piece, ...]

    def assembled(self, flat: FlatTensor) -> torch.Tensor:
        """The parameter, or a moment of it, whole; padding is dropped."""
        parts = [
            flat(piece.rank, piece.sub_group).narrow(0, piece.start, piece.numel)
            for piece in self.pieces
        ]
        return torch.cat(parts)[: self.shape.numel()].view(self.shape)


def pieces_of_stage_3(
    shapes: Sequence[Mapping[str, torch.Size]], world_size: int
) -> tuple[list[FlatParameter], list[int]]:
    """The parameters of every sub-group in order, and the elements that a rank has of each."""
    parameters, sizes = [], []
    for sub_group, of_group in enumerate(shapes):
        start = 0
        for name, shape in of_group.items():
            numel = math.ceil(shape.numel() / world_size)
            pieces = tuple(Piece(rank, sub_group, start, numel) for rank in range(world_size))
            parameters.append(FlatParameter(name, shape, sub_group, pieces))
            start += numel
        sizes.append(start)
    return parameters, sizes


def pieces_of_stage_1_and_2(
    shapes: Sequence[Mapping[str, torch.Size]], mappings: Sequence[Sequence[Mapping[str, Any]]]
) -> list[FlatParameter]:
    """`mappings[rank][group][name]` has the start and numel of the rank's piece, in order of ranks.

    Raises CheckpointError where they do not add up to a parameter.
    """
    parameters = []
    for group, of_group in enumerate(shapes):
        for name, shape in of_group.items():
            found = [(rank, of[group].get(name)) for rank, of in enumerate(mappings)]
            pieces = tuple(
                Piece(rank, group, at.start, at.numel) for rank, at in found if at is not None
            )
            if (held := sum(piece.numel for piece in pieces)) != shape.numel():
                raise CheckpointError(
                    f"{name} has {shape.numel()} elements, and the optimizer files hold {held} of "
                    "them: they are not of one save; take another checkpoint"
                )
            parameters.append(FlatParameter(name, shape, group, pieces))
    return parameters

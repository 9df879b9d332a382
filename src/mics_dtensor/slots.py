"""Slots: a parameter beside the tensor that the inner optimizer updates in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.mesh import Ranks, Stages, ranks_of
from mics_dtensor.slices import Slice, gather_slices, slice_of, slices_of_unit
from mics_dtensor.stage import stage
from mics_dtensor.upstream import (
    Box,
    Piece,
    Unit,
    boxes_of,
    flat_shard,
    is_replaced,
    local_of,
    place_of_shard,
)


@dataclass(eq=False)
class Slot:
    """A parameter, and the tensor that the inner optimizer updates: its slice.

    The slice is a view of the shard, or, with masters, an fp32 copy that the shard is rounded from.
    """

    slice: Slice
    parameter: nn.Parameter
    tensor: torch.Tensor
    has_master: bool
    address: int = 0  # of the shard

    @classmethod
    def of(cls, its: Slice, *, has_master: bool) -> Slot:
        """With the shard as it stands."""
        view = its.of(flat_shard(its.param))
        tensor = view.float().clone() if has_master else view
        return cls(its, its.param.parameter, tensor, has_master, view.data_ptr())

    @property
    def shard(self) -> torch.Tensor:
        """The whole shard of this rank, 1-D."""
        return flat_shard(self.slice.param)

    def follow(self) -> None:
        """To where the shard lies by now. Raises ConfigError if it is another parameter's.

        A master stays where the shard is still what it rounds to, and is taken anew elsewhere:
        somebody has loaded or written weights. Compared each time, since what DTensor and DCP write
        leaves no trace in the version of the shard.
        """
        if is_replaced(self.slice.param, self.parameter):
            raise ConfigError(
                f"{self.slice.param.name} is another object than when ReplicaShardedOptimizer was "
                "made (load_state_dict(assign=True)?), and would not be trained: load in place, or "
                "make the optimizer anew"
            )
        view = self.slice.of(self.shard)
        if self.has_master:
            kept = self.tensor.to(view.dtype) == view
            self.tensor.copy_(torch.where(kept, self.tensor, view.float()))
        elif view.data_ptr() != self.address or view.dtype != self.tensor.dtype:
            self.tensor.data, self.address = view, view.data_ptr()

    def refuse_wide_shard(self) -> None:
        """A master beside a shard as wide would only cost memory."""
        if self.has_master and self.shard.dtype.itemsize >= self.tensor.itemsize:
            raise ConfigError(
                f"{self.slice.param.name} is {self.shard.dtype} still, and its master too: after "
                'making the optimizer with master_weights="sharded" call model.to(torch.bfloat16), '
                'or use master_weights="fp32"'
            )

    def take_gradient(self) -> None:
        """The slice of `.grad`; no copy where dtypes agree."""
        gradient = self.parameter.grad
        self.tensor.grad = None
        if gradient is not None:
            self.tensor.grad = self.slice.of(local_of(gradient)).to(self.tensor.dtype)

    def write_back(self) -> None:
        """Round the master into the shard."""
        if self.has_master:
            self.slice.of(self.shard).copy_(self.tensor)

    @property
    def boxes(self) -> list[Box]:
        """The slice as boxes of the whole tensor."""
        offsets, sizes = place_of_shard(self.parameter)
        return [
            (tuple(a + b for a, b in zip(offsets, inner, strict=True)), its)
            for inner, its in boxes_of(sizes, *self.slice.mine)
        ]

    def as_piece(self, value: torch.Tensor) -> Piece:
        """A state of the slice's shape, for a checkpoint; shares storage."""
        return Piece.of(value, self.parameter.shape, self.boxes)

    def from_saved(self, value: Any) -> Any:
        """A state of this slice out of a piece, or out of a whole tensor; other values as they are.

        Raises CheckpointError for a piece of another layout.
        """
        if isinstance(value, Piece):
            if list(value.boxes) != self.boxes:
                raise CheckpointError(
                    f"a state of {self.slice.param.name} is of another layout, with "
                    f"{list(value.boxes)}, and here it is {self.boxes}: load it with "
                    "torch.distributed.checkpoint, which moves between layouts"
                )
            return value.flat.clone()
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 or value.shape != self.parameter.shape:
            return value.clone()
        local = local_of(value)
        if local is not value:
            return self.slice.of(local).clone()
        parts = [
            value[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].reshape(-1)
            for box in self.boxes
        ]
        return torch.cat(parts) if parts else value.new_empty(0)


@dataclass(eq=False)
class UnitSlots:
    """The slots of one unit: one message after the step."""

    unit: Unit
    slots: list[Slot]

    @classmethod
    def of(cls, unit: Unit, chosen: set[int], *, has_masters: bool) -> UnitSlots | None:
        """None if no parameter is among the `chosen`. Raises ConfigError if it is sliced."""
        if not any(id(param.parameter) in chosen for param in unit.params):
            return None
        for param in unit.params:
            if slice_of(param.parameter) is not None:
                raise ConfigError(
                    f"{param.name} is sliced by a ReplicaShardedOptimizer already: give all "
                    "parameters of a unit to one, or delete the other first"
                )
        slices = slices_of_unit(unit, torch.float32 if has_masters else None)
        return cls(unit, [Slot.of(its, has_master=has_masters) for its in slices])

    def gather(self, stages: Mapping[Ranks, Stages]) -> None:
        """The slices of the other replicas. Collective over the replication group.

        `stages` are those of the replication groups with several ranks in a node, by their ranks.
        """
        if self.unit.num_replicas == 1 or self.unit.replicate_group is None:
            return
        slices = [slot.slice for slot in self.slots]
        with stage("gather of updated slices", self.unit.name, self.unit.replicate_group) as group:
            gather_slices(
                slices, group=group, device=self.unit.device, stages=stages.get(ranks_of(group))
            )

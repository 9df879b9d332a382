"""Slots: a parameter beside the tensor that the inner optimizer updates in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.mesh import Ranks, Stages, ranks_of
from mics_dtensor.slices import Slice, SlicesGathered, slice_of, slices_of_unit
from mics_dtensor.stage import stage
from mics_dtensor.upstream import (
    Box,
    Piece,
    Unit,
    as_summand,
    before_unshard,
    boxes_of,
    flat_shard,
    is_replaced,
    lay_end_to_end,
    lies_end_to_end,
    local_of,
    place_of_shard,
    version_of,
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
    version: int = 0  # of a master, when we last wrote to it

    @classmethod
    def of(cls, its: Slice, *, has_master: bool) -> Slot:
        """With the shard as it stands."""
        view = its.of(flat_shard(its.param))
        # No view by autograd's account: as one it would keep the storage that the shard moves from.
        tensor = torch.empty(0, dtype=view.dtype, device=view.device)
        tensor.data = view.float().clone() if has_master else view
        made = cls(its, its.param.parameter, tensor, has_master, view.data_ptr())
        made.settle()
        return made

    @property
    def shard(self) -> torch.Tensor:
        """The whole shard of this rank, 1-D."""
        return flat_shard(self.slice.param)

    def follow(self) -> None:
        """To where the shard lies by now. Raises ConfigError if it is another parameter's.

        A master stays where the shard is still what it rounds to, and is taken anew elsewhere:
        somebody has loaded or written weights. Compared each time, since what DTensor and DCP write
        leaves no trace in the version of the shard. What DCP writes into a master does: then
        load_state_dict has to follow, or the shard would win. Raises CheckpointError.
        """
        if self.has_master:
            self.tensor.copy_(self._taken_anew(self._kept()))
            self.settle()
            return
        self._refuse_replaced()
        view = self.slice.of(self.shard)
        if view.data_ptr() != self.address or view.dtype != self.tensor.dtype:
            self.tensor.data, self.address = view, view.data_ptr()

    def up_to_date(self) -> torch.Tensor:
        """What `follow` would make of the master, which stays as it is: itself, or a copy.

        Waits for the device. Raises as `follow` does.
        """
        kept = self._kept()
        return self.tensor if kept.all() else self._taken_anew(kept)

    def _kept(self) -> torch.Tensor:
        """Where the shard is what the master rounds to."""
        self._refuse_replaced()
        if version_of(self.tensor) != self.version:
            raise CheckpointError(
                f"{self.slice.param.name} was loaded into the state dict of the model and not "
                "into the model: call model.load_state_dict(state), or set_model_state_dict, "
                "with what torch.distributed.checkpoint has filled"
            )
        view = self.slice.of(self.shard)
        return self.tensor.to(view.dtype) == view

    def _taken_anew(self, kept: torch.Tensor) -> torch.Tensor:
        return torch.where(kept, self.tensor, self.slice.of(self.shard).float())

    def _refuse_replaced(self) -> None:
        if is_replaced(self.slice.param, self.parameter):
            raise ConfigError(
                f"{self.slice.param.name} is another object than when ReplicaShardedOptimizer was "
                "made (load_state_dict(assign=True)?), and would not be trained: load in place, or "
                "make the optimizer anew"
            )

    def refuse_wide_shard(self) -> None:
        """A master beside a shard as wide would only cost memory."""
        if self.has_master and self.shard.dtype.itemsize >= self.tensor.itemsize:
            raise ConfigError(
                f"{self.slice.param.name} is {self.shard.dtype} still, and its master too: give "
                "fully_shard a MixedPrecisionPolicy(param_dtype=torch.bfloat16), or "
                'after making the optimizer with master_weights="sharded" call '
                'model.to(torch.bfloat16), or use master_weights="fp32"'
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
            self.settle()

    def settle(self) -> None:
        """What is in the master by now is known to be in the shard."""
        self.version = version_of(self.tensor)

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

    @torch.no_grad()
    def as_whole(self, value: torch.Tensor, group: dist.ProcessGroup | None) -> DTensor:
        """A state of the slice's shape, of the whole shard. Collective over `group`."""
        local = torch.zeros(self.shard.shape, dtype=value.dtype, device=value.device)
        self.slice.of(local).copy_(value)
        if group is not None and group.size() > 1:  # disjoint slices: the sum is exact
            dist.all_reduce(local, group=group)
        return as_summand(self.slice.param, local.view(self.slice.param.local.shape), axis=None)

    def as_cut(self, value: torch.Tensor) -> torch.Tensor:
        """A DTensor as the parameter is cut; a plain tensor is whole, and stays."""
        if isinstance(value, DTensor) and isinstance(self.parameter, DTensor):
            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            return value.redistribute(mesh, placements) if value.placements != placements else value
        return value

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
        if value.dim() == 0:
            return value.clone()
        if value.shape != self.parameter.shape:
            raise CheckpointError(
                f"a state for {self.slice.param.name}, of {tuple(self.parameter.shape)}, has "
                f"{tuple(value.shape)}: the saved optimizer has its parameters in another order, "
                "or is of another model; give both the same param_groups"
            )
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
    """The slots of one unit: one message after the step, perhaps on its way for a while."""

    unit: Unit
    slots: list[Slot]
    room: torch.Tensor | None = None  # in which the shards lie end to end: gathered in place
    in_flight: SlicesGathered | None = None
    undo: Callable[[], None] | None = None  # takes `land` away from FSDP2's gather
    landed: torch.Event | None = None  # on CUDA: when the shards are whole

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
        return cls(unit, [Slot.of(each, has_master=has_masters) for each in slices])

    def lay(self) -> None:
        """Move the shards end to end, so that they are gathered where they lie."""
        params, num_replicas = [slot.slice.param for slot in self.slots], self.unit.num_replicas
        if num_replicas == 1 or any(param.local.device != self.unit.device for param in params):
            return
        share = -(-sum(param.local.numel() for param in params) // num_replicas)
        self.room = lay_end_to_end(params, least_numel=num_replicas * share)
        for slot in self.slots:
            slot.follow()

    def gather(self, stages: Mapping[Ranks, Stages], *, overlap: bool = False) -> None:
        """The slices of the other replicas. Collective over the replication group.

        `stages` are those of the replication groups with several ranks in a node, by their ranks.
        With `overlap` it is over when FSDP2 gathers the unit, or after `land`.
        """
        slices = [slot.slice for slot in self.slots]
        if (sent := self.send(slices, stages, overlap=overlap)) is None:
            return
        self.in_flight = sent
        if overlap:
            self.undo = before_unshard(self.unit, self.land)
        else:
            self.land()

    def send(
        self, slices: Sequence[Slice], stages: Mapping[Ranks, Stages], *, overlap: bool = False
    ) -> SlicesGathered | None:
        """Start to gather some slices of the unit; None where there is one replica."""
        if self.unit.num_replicas == 1 or self.unit.replicate_group is None:
            return None
        params = [slot.slice.param for slot in self.slots]
        if self.room is not None and not lies_end_to_end(params, self.room):
            self.room = None
        whole = len(slices) == len(params)
        with stage("gather of updated slices", self.unit.name, self.unit.replicate_group) as group:
            return SlicesGathered(
                slices,
                group=group,
                device=self.unit.device,
                stages=stages.get(ranks_of(group)),
                room=self.room if whole else None,
                async_op=overlap,
            )

    def land(self) -> None:
        """Until the shards are whole (on CUDA: until the current stream may use them)."""
        if self.in_flight is None or self.unit.replicate_group is None:
            return
        sent, self.in_flight = self.in_flight, None
        if self.undo is not None:
            self.undo()
            self.undo = None
        with stage("gather of updated slices", self.unit.name, self.unit.replicate_group):
            sent.wait()
        if self.unit.device.type != "cpu":
            self.landed = torch.get_device_module(self.unit.device).Event()
            self.landed.record()

    def wait(self) -> None:
        """As `land`, also where another stream has brought the shards in."""
        self.land()
        if self.landed is not None:
            torch.get_device_module(self.unit.device).current_stream().wait_event(self.landed)
            self.landed = None

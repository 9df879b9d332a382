"""An FSDP unit as the planner sees it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mics_dtensor.layout import GroupShape


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`count` like FSDP units: parameters gathered and reduced in one message.

    `shapes` are those of the parameters before sharding (one rank's part under tensor parallel),
    `frozen` those without gradients, `repeated` those among `shapes` that are one parameter with
    another: sent twice, trained once; itemsizes in bytes. `gathers` counts those of one micro-step:
    2 if the backward gathers again, in the groups `regather` where it is not the whole partition
    group that gathers then (integer reshard_after_forward). `reduced` are the messages in which its
    gradients go, by their shapes, where parts of the unit are ready apart; else they go in one.
    `update_itemsize` is that of the shards where optimizer states are sharded over the replicas.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    shard: GroupShape
    replicate: GroupShape
    frozen: tuple[tuple[int, ...], ...] = ()
    repeated: tuple[tuple[int, ...], ...] = ()
    count: int = 1
    gathers: int = 2
    reduced: tuple[tuple[tuple[int, ...], ...], ...] = ()
    regather: GroupShape | None = None
    gather_itemsize: int = 4
    reduce_itemsize: int = 4
    hop_itemsize: int = 4
    update_itemsize: int | None = None

    @property
    def numel(self) -> int:
        """Elements with gradients, of one unit, without padding."""
        return sum(prod(shape) for shape in self.shapes)

    def shard_numel(self, *, frozen: bool = False) -> int:
        """Elements of one shard of the trainable (or frozen) parameters, with FSDP2's padding."""
        return self._padded(self.frozen if frozen else self.shapes)

    @property
    def reduced_numels(self) -> tuple[int, ...]:
        """Elements of one shard in each message of the reduction, with FSDP2's padding."""
        return tuple(self._padded(shapes) for shapes in self.reduced or (self.shapes,))

    def _padded(self, shapes: Sequence[tuple[int, ...]]) -> int:
        return sum(-(-shape[0] // self.shard.size) * prod(shape[1:]) for shape in shapes)

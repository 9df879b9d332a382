"""Bytes and collectives of one optimizer step, by stage and by link. Pure.

Bytes are those that the best algorithm for the given groups sends: a ring that visits the ranks
node by node (all-gather and reduce-scatter: g - 1 shards over each of g edges; all-reduce: twice
that), or the two stages of `collectives.py`. They are summed over the world: `inter_node_bytes`
leave the nodes, `intra_node_bytes` pass between ranks of one node. NCCL's rings reach them; gloo's
own reduce-scatter moves an all-reduce. The equations stand in docs/mechanism.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mics_dtensor.plan.first_hop import gathers, reductions
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.second_hop import boundary
from mics_dtensor.plan.stage import Collective, Stage
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True)
class Traffic:
    """All stages of a step."""

    stages: tuple[Stage, ...]
    num_micro_steps: int

    @property
    def inter_node_bytes(self) -> int:
        """Bytes out of all nodes in an optimizer step, summed."""
        return sum(stage.inter_node_bytes for stage in self.stages)

    @property
    def intra_node_bytes(self) -> int:
        """Bytes between ranks of one node in an optimizer step, summed over the nodes."""
        return sum(stage.intra_node_bytes for stage in self.stages)

    @property
    def inter_node_bytes_per_micro_step(self) -> int:
        """Bytes out of all nodes in a micro-step before the boundary."""
        every = sum(stage.inter_node_bytes for stage in self.stages if stage.every_micro_step)
        return every // self.num_micro_steps

    @property
    def collectives(self) -> dict[Collective, int]:
        """Calls of one rank in an optimizer step, by kind."""
        calls: Counter[Collective] = Counter()
        for stage in self.stages:
            calls[stage.collective] += stage.calls
        return dict(calls)


def step_traffic(units: Sequence[Unit], options: Options) -> Traffic:
    """The traffic of one optimizer step of a model whose units are `units`, in forward order."""
    stages: list[Stage] = []
    for unit in units:
        stages += gathers(unit, options)
        stages += reductions(unit, options) if unit.shapes else []
    stages += boundary(units, options)
    return Traffic(tuple(stages), options.num_micro_steps)

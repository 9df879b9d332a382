"""A step's traffic beside what users compare it with: plain FSDP, and plain HSDP. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.slices import adam_bytes
from mics_dtensor.plan.stage import Collective
from mics_dtensor.plan.table import render
from mics_dtensor.plan.traffic import Traffic, step_traffic
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True)
class Comparison:
    """What `explain` returns; `print` it for the table."""

    units: tuple[Unit, ...]
    options: Options
    num_nodes: int
    ranks_per_node: int

    @property
    def traffic(self) -> Traffic:
        """The stages of this run."""
        return step_traffic(self.units, self.options)

    @property
    def plain_fsdp(self) -> Traffic:
        """The same units sharded over all ranks (ZeRO-3), one ring each."""
        everyone = over_all_ranks(
            self.units, num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node
        )
        return step_traffic(everyone, self._plain)

    @property
    def plain_hsdp(self) -> Traffic:
        """The same groups, one ring each, and an all-reduce over the replicas every micro-step."""
        units = [replace(unit, regather=None, update_itemsize=None) for unit in self.units]
        return step_traffic(units, self._plain)

    @property
    def inter_node_bytes(self) -> int:
        """Bytes out of all nodes in an optimizer step, summed."""
        return self.traffic.inter_node_bytes

    @property
    def intra_node_bytes(self) -> int:
        """Bytes between ranks of one node in an optimizer step, summed over the nodes."""
        return self.traffic.intra_node_bytes

    @property
    def collectives(self) -> dict[Collective, int]:
        """Calls of one rank in an optimizer step, by kind."""
        return self.traffic.collectives

    @property
    def adam_bytes(self) -> int:
        """Of a rank: weights, gradients and AdamW's states, all trainable parameters together."""
        return sum(
            unit.count
            * adam_bytes(
                unit.shard_numel() - replace(unit, shapes=unit.repeated).shard_numel(),
                num_replicas=unit.replicate.size,
                itemsize=unit.update_itemsize,
            )
            for unit in self.units
        )

    @property
    def _plain(self) -> Options:
        return replace(self.options, hierarchical=False, two_hop=False)

    def __str__(self) -> str:
        has_replicas = any(unit.replicate.size > 1 for unit in self.units)
        others = {"plain HSDP, these groups": self.plain_hsdp} if has_replicas else {}
        told = render(
            self.units, self.traffic, {**others, "plain FSDP over all ranks": self.plain_fsdp}
        )
        if not any(unit.update_itemsize for unit in self.units):
            return told
        whole = replace(self, units=tuple(replace(u, update_itemsize=None) for u in self.units))
        late = self.options.overlap_update
        return (
            f"{told}\n\noptimizer states over the replicas: {self.adam_bytes / 1e9:.3g} GB of "
            "weights, gradients and AdamW's states a rank; with whole ones "
            f"{whole.adam_bytes / 1e9:.3g} GB"
            f"{'; updated slices travel beside the next forward' * late}"
        )


def over_all_ranks(units: Sequence[Unit], *, num_nodes: int, ranks_per_node: int) -> list[Unit]:
    """The same units under plain FSDP over all data-parallel ranks."""
    one = GroupShape(1, 1, num_nodes * ranks_per_node)
    everyone = GroupShape(num_nodes, ranks_per_node, 1)
    return [
        replace(
            unit, shard=_whole(unit, everyone), replicate=one, regather=None, update_itemsize=None
        )
        for unit in units
    ]


def _whole(unit: Unit, everyone: GroupShape) -> GroupShape:
    """All data-parallel ranks; under tensor parallel, `tp` such groups lie side by side."""
    data_parallel = unit.shard.size * unit.replicate.size
    tp = everyone.size // data_parallel
    per_node = max(1, everyone.ranks_per_node // tp)
    return GroupShape(data_parallel // per_node, per_node, tp)

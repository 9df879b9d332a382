"""What runs beside products, and what a runtime adds to a message: named profiles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mics_dtensor.plan.cluster import Cluster
from mics_dtensor.plan.cost import message_bytes, stage_s
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a runtime adds to every message beside the wire.

    Seconds a message and seconds a message and rank (a view and a copy for every rank's part);
    `copies` of the whole message in memory; what is used again at least `reuse_numel` elements
    later is freed and gathered once more.
    """

    message_s: float
    rank_s: float
    copies: int
    reuse_numel: float


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which messages run beside products, and how much slower those are meanwhile.

    `slowdown` is seconds that products lose for each second of messages beside them. `by_matrix`:
    a message a matrix, not one a unit.
    """

    gather: bool
    reduce: bool
    boundary: bool = False
    update: bool = False
    slowdown: float = 0.0
    by_matrix: bool = False
    host: Host | None = None

    def on(self, cluster: Cluster) -> Overlap:
        """The same with what products lose on that cluster."""
        return replace(self, slowdown=cluster.overlap_slowdown)


HOST_0_5 = Host(message_s=0.0, rank_s=48.8e-6, copies=1, reuse_numel=1e9)
"""DeepSpeed 0.5, fitted by `python -m benchmarks.planner --fit` on 8 and 64 GPUs."""

PROFILES: Mapping[str, Overlap] = {
    "fsdp2": Overlap(gather=True, reduce=True),
    "hsdp": Overlap(gather=True, reduce=True, boundary=True),
    "deepspeed": Overlap(gather=True, reduce=True, by_matrix=True),
    "deepspeed-0.5": Overlap(
        gather=False,
        reduce=False,
        by_matrix=True,
        host=HOST_0_5,
    ),
    "none": Overlap(gather=False, reduce=False),
}
"""`hsdp`: torch's, which sums over the replicas in the backward. `deepspeed` since 0.6; 0.5 waits
for the device at each message. Sources: docs/cost_model.md."""


def matrices(unit: Unit) -> list[int]:
    """Elements of the unit's matrices, in the order of the forward."""
    return [prod(shape) for shape in unit.shapes if len(shape) > 1]


def message_s(stage: Stage, unit: Unit, cluster: Cluster, overlap: Overlap) -> float:
    """Seconds of a unit's stage as the runtime sends it (T7)."""
    if overlap.by_matrix:
        stage = replace(stage, calls=stage.calls * max(1, len(matrices(unit))))
    seconds = stage_s(stage, cluster)
    if (host := overlap.host) is None or not stage.calls:
        return seconds
    launches = stage.calls / stage.blocks
    seconds += launches * (host.message_s + host.rank_s * stage.group.size)
    return seconds + 2 * host.copies * message_bytes(stage) / cluster.memory_bytes_per_s


def gathered_again(sizes: Sequence[int], reuse_numel: float) -> float:
    """Share of a block that is freed between its second forward and its backward (T8).

    `sizes` are the matrices in forward order: between the two uses of one lie itself, those after
    it, and those after it once more.
    """
    freed = 0
    for place, size in enumerate(sizes):
        after = sum(sizes[place + 1 :])
        freed += size if size + 2 * after >= reuse_numel else 0
    return freed / sum(sizes) if sizes else 0.0

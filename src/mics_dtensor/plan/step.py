"""Seconds of an optimizer step by term. Pure; the equations are in docs/cost_model.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster import Cluster
from mics_dtensor.plan.compute import Work, unit_compute_s
from mics_dtensor.plan.cost import added_s, stage_s
from mics_dtensor.plan.overlap import Overlap, gathered_again, matrices, message_s
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.tensor_parallel import messages_s, unit_messages
from mics_dtensor.plan.traffic import Traffic
from mics_dtensor.plan.unit import Unit

ADAMW_PASSES = 8
"""fp32 numbers a parameter moves: AdamW reads p, g, m, v and writes p, m, v; the norm reads g."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step; their sum is the step."""

    compute_s: float
    exposed_gather_s: float
    exposed_reduce_s: float
    boundary_s: float
    update_s: float
    optimizer_s: float
    tensor_parallel_s: float = 0.0

    @property
    def step_s(self) -> float:
        """All terms."""
        gathers = self.exposed_gather_s + self.exposed_reduce_s
        mine = self.compute_s + gathers + self.boundary_s + self.update_s + self.optimizer_s
        return mine + self.tensor_parallel_s


def step_time(
    units: Sequence[Unit], traffic: Traffic, work: Work, cluster: Cluster, overlap: Overlap
) -> StepTime:
    """The terms of a step (T1). `traffic` is that of `units`, which are in forward order."""
    pieces = _pieces(units, traffic, work, cluster, overlap)
    steps = traffic.num_micro_steps
    forward_s, backward_s = exposed_s(pieces, overlap)
    compute_s = sum(piece.count * (piece.forward_s + piece.backward_s) for piece in pieces)
    compute_s += overlap.slowdown * _hidden_s(pieces, forward_s + backward_s)
    boundary_s = sum(stage_s(stage, cluster) for stage in hop_stages(traffic))
    update_s = 0.0
    if work.num_states_shards is not None:
        stages = update_stages(units, work.num_states_shards)
        update_s = sum(stage_s(stage, cluster) for stage in stages)
        whole = units[0].shard.size * units[0].replicate.size
        if work.num_states_shards == whole:
            boundary_s /= 2  # a reduce-scatter: the other half of the all-reduce is the update
    last_backward_s = sum(piece.count * piece.backward_s for piece in pieces)
    first_forward_s = sum(piece.count * piece.forward_s for piece in pieces)
    hidden_boundary_s = min(boundary_s, last_backward_s) * overlap.boundary
    hidden_update_s = min(update_s, first_forward_s) * overlap.update
    beside_s = overlap.slowdown * (hidden_boundary_s + hidden_update_s)
    return StepTime(
        compute_s=steps * compute_s + beside_s,
        exposed_gather_s=steps * (forward_s.gather_s + backward_s.gather_s),
        exposed_reduce_s=steps * (forward_s.reduce_s + backward_s.reduce_s),
        boundary_s=boundary_s - hidden_boundary_s,
        update_s=update_s - hidden_update_s,
        optimizer_s=optimizer_s(units, work, cluster),
        tensor_parallel_s=steps * sum(piece.count * piece.tensor_parallel_s for piece in pieces),
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`count` like units in a micro-step: their products, and their messages.

    `tensor_parallel_s` are those over its tensor-parallel group, which products wait for.
    """

    count: int
    forward_s: float
    backward_s: float
    gather_s: float
    gather_again_s: float
    reduce_s: float
    tensor_parallel_s: float = 0.0


@dataclass(frozen=True)
class Exposed:
    """Seconds that products wait for messages."""

    gather_s: float
    reduce_s: float

    def __add__(self, other: Exposed) -> Exposed:
        return Exposed(self.gather_s + other.gather_s, self.reduce_s + other.reduce_s)


def _pieces(
    units: Sequence[Unit], traffic: Traffic, work: Work, cluster: Cluster, overlap: Overlap
) -> list[Piece]:
    by_unit: dict[str, list[Stage]] = {}
    for stage in traffic.stages:
        by_unit.setdefault(stage.unit, []).append(stage)
    pieces = []
    for unit in units:
        each = unit.count * traffic.num_micro_steps
        stages = by_unit.get(unit.name, ())
        seconds = [(s.name, message_s(s, unit, cluster, overlap) / each) for s in stages]
        whole = sum(s for name, s in seconds if name in GATHERS)
        first = whole if unit.regather is not None else whole / unit.gathers
        again = whole - first
        if overlap.host is not None and work.checkpointing == "full":
            again *= 1 + gathered_again(matrices(unit), overlap.host.reuse_numel)
        forward_s, backward_s = unit_compute_s(unit, work, cluster)
        in_forward, in_backward = added_s(unit, cluster, is_fsdp2=not overlap.by_matrix)
        forward_s = in_forward.to(forward_s, cluster)
        backward_s = in_backward.to(backward_s, cluster)
        pieces.append(
            Piece(
                count=unit.count,
                forward_s=forward_s,
                backward_s=backward_s,
                gather_s=first,
                gather_again_s=again + sum(s for name, s in seconds if name == "gather again"),
                reduce_s=sum(s for name, s in seconds if name in REDUCES),
                tensor_parallel_s=tensor_parallel_s(unit, work, cluster),
            )
        )
    return pieces


GATHERS = ("gather", "gather between nodes", "gather within the node")
REDUCES = ("reduce", "reduce within the node", "reduce between nodes")


def hop_stages(traffic: Traffic) -> list[Stage]:
    """The second hop: what crosses the replicas."""
    at_the_boundary = ("boundary", "agreement", "gather of slices")
    return [stage for stage in traffic.stages if stage.name.startswith(at_the_boundary)]


def tensor_parallel_s(unit: Unit, work: Work, cluster: Cluster) -> float:
    """Seconds of one unit's messages inside its layers in a micro-step: nothing hides them (T9)."""
    if work.tensor_parallel == 1:
        return 0.0
    messages = unit_messages(
        unit,
        work.shape,
        tokens=work.tokens,
        checkpointing=work.checkpointing,
        num_loss_chunks=work.num_loss_chunks,
    )
    return messages_s(messages, work.tensor_parallel, cluster)


def exposed_s(pieces: Sequence[Piece], overlap: Overlap) -> tuple[Exposed, Exposed]:
    """Messages of a micro-step that nothing hides, in the forward and in the backward (T3).

    FSDP2 gathers one unit ahead. In the backward the gather of the next unit and the reduction of
    the one before share the link while a unit computes. The first gather and the last reduction
    have nothing beside them.
    """
    forward = [piece for piece in pieces for _ in range(min(piece.count, 3))]
    weights = [_weight(piece, i) for piece in pieces for i in range(min(piece.count, 3))]
    ahead_s = Exposed(0.0, 0.0)
    for place, (piece, weight) in enumerate(zip(forward, weights, strict=True)):
        beside_s = forward[place - 1].forward_s if place and overlap.gather else 0.0
        ahead_s += Exposed(weight * max(0.0, piece.gather_s - beside_s), 0.0)
    back_s = Exposed(0.0, 0.0)
    last = len(forward) - 1
    for place, (piece, weight) in enumerate(zip(forward, weights, strict=True)):
        gather_s = forward[place - 1].gather_again_s if place else 0.0
        reduce_s = forward[place + 1].reduce_s if place < last else 0.0
        back_s += _beside(gather_s, reduce_s, piece.backward_s, weight, overlap)
    return ahead_s, back_s + Exposed(forward[last].gather_again_s, forward[0].reduce_s)


def _weight(piece: Piece, place: int) -> int:
    """Three of like units stand for all: the first, the last, and those between."""
    return piece.count - 2 if piece.count > 3 and place == 1 else 1


def _beside(
    gather_s: float, reduce_s: float, compute_s: float, weight: int, overlap: Overlap
) -> Exposed:
    hidden = gather_s * overlap.gather + reduce_s * overlap.reduce
    left = max(0.0, hidden - compute_s) / hidden if hidden else 0.0
    gather_s *= left if overlap.gather else 1.0
    reduce_s *= left if overlap.reduce else 1.0
    return Exposed(weight * gather_s, weight * reduce_s)


def _hidden_s(pieces: Sequence[Piece], exposed: Exposed) -> float:
    sent_s = sum(p.count * (p.gather_s + p.gather_again_s + p.reduce_s) for p in pieces)
    return max(0.0, sent_s - exposed.gather_s - exposed.reduce_s)


def optimizer_s(units: Sequence[Unit], work: Work, cluster: Cluster) -> float:
    """Seconds of AdamW over the states of a rank, bound by its memory (T4)."""
    numel = sum(unit.count * unit.shard_numel() for unit in units)
    if work.num_states_shards is not None:
        numel = numel * units[0].shard.size // work.num_states_shards
    return numel * 4 * ADAMW_PASSES / cluster.memory_bytes_per_s


def update_stages(units: Sequence[Unit], num_states_shards: int) -> list[Stage]:
    """The updated slices of every shard, gathered over the ranks that share its states (T5)."""
    stages = []
    for unit in units:
        peers, rest = divmod(num_states_shards, unit.shard.size)
        if rest or not peers or unit.replicate.size % peers:
            raise PlanError(
                f"states cut over {num_states_shards} ranks do not fit {unit.shard.size} shards in "
                f"{unit.replicate.size} replicas; give a multiple of the former, at most the world"
            )
        inside = min(peers, unit.replicate.ranks_per_node)
        others = unit.replicate.size // peers * unit.replicate.num_groups
        group = GroupShape(peers // inside, inside, others)
        total = (peers - 1) * unit.gather_itemsize * unit.shard_numel() // peers
        total *= unit.count * others
        between = group.num_nodes if group.num_nodes > 1 else 0
        inside_edges = (peers if peers > 1 else 0) - between
        stages.append(
            Stage(
                unit=unit.name,
                name="update",
                collective="all_gather",
                group=group,
                calls=unit.count,
                inter_node_bytes=between * total,
                intra_node_bytes=inside_edges * total,
                every_micro_step=False,
            )
        )
    return stages

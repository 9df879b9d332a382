"""Bytes and collectives of one optimizer step, by stage and by link. Pure.

Bytes are those that the best algorithm for the given groups sends: a ring that visits the ranks
node by node (all-gather and reduce-scatter: g - 1 shards over each of g edges; all-reduce: twice
that), or the two stages of `collectives.py`. They are summed over the world: `inter_node_bytes`
leave the nodes, `intra_node_bytes` pass between ranks of one node. NCCL's rings reach them; gloo's
own reduce-scatter moves an all-reduce. The equations stand in docs/mechanism.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.slices import sliced_hop
from mics_dtensor.plan.stage import Collective, Stage, edges, split

BUCKET_SIZE_BYTES = 2**20
"""Units smaller than this share a message at the boundary.

Measured (benchmarks/results, `crossover`): from 512 KiB on a message for all is no faster, as the
copy costs what the fewer messages save; twice that, for links that are faster than those.
"""

AGREEMENT_NUMBERS = 3
"""int32 numbers of the agreement before the second hop, beside one a parameter."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`count` like FSDP units: parameters gathered and reduced in one message.

    `shapes` are those of the parameters before sharding (one rank's part under tensor parallel),
    `frozen` those without gradients, `repeated` those among `shapes` that are one parameter with
    another: sent twice, trained once; itemsizes in bytes. `gathers` counts those of one micro-step:
    2 if the backward gathers again, in the groups `regather` where it is not the whole partition
    group that gathers then (integer reshard_after_forward). `reduces` counts the messages in which
    its gradients go: more than one where parts of the unit are ready apart. `update_itemsize` is
    that of the shards where optimizer states are sharded over the replicas.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    shard: GroupShape
    replicate: GroupShape
    frozen: tuple[tuple[int, ...], ...] = ()
    repeated: tuple[tuple[int, ...], ...] = ()
    count: int = 1
    gathers: int = 2
    reduces: int = 1
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
        shapes = self.frozen if frozen else self.shapes
        return sum(-(-shape[0] // self.shard.size) * prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is run."""

    num_micro_steps: int = 1
    hierarchical: bool = True
    two_hop: bool = True  # False: all-reduce in every micro-step, as HSDP does
    bucket_size_bytes: int = BUCKET_SIZE_BYTES
    overlap_update: bool = False  # the gather of slices beside the next forward: the same bytes
    backend: Literal["nccl", "gloo"] = "nccl"


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
        stages += _gather(unit, options)
        stages += _reduce(unit, options) if unit.shapes else []
    stages += _boundary(units, options)
    return Traffic(tuple(stages), options.num_micro_steps)


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut the positions of `sizes` (bytes) into consecutive buckets, each closed at `limit`.

    Whole units first: one of at least `limit` bytes keeps a message of its own, without a copy.
    """
    found: list[list[int]] = []
    filled = limit
    for position, size in enumerate(sizes):
        if filled >= limit or size >= limit:
            found.append([])
            filled = 0
        found[-1].append(position)
        filled += size
    return found


def _gather(unit: Unit, options: Options) -> Iterator[Stage]:
    shard_bytes = unit.gather_itemsize * (unit.shard_numel() + unit.shard_numel(frozen=True))
    again = unit.regather
    times = unit.count * (unit.gathers if again is None else 1) * options.num_micro_steps
    if unit.shard.size == 1:
        return
    if _is_hierarchical(unit.shard, options):
        across, within = split(unit.shard)
        calls = times * unit.shard.num_nodes
        yield _ring(unit, "gather between nodes", "all_gather", across, shard_bytes, times)
        inside = _ring(unit, "gather within the node", "all_gather", within, shard_bytes, calls)
        yield replace(inside, blocks=unit.shard.num_nodes)
    else:
        yield _ring(unit, "gather", "all_gather", unit.shard, shard_bytes, times)
    if again is not None and again.size > 1:  # a group of other ranks: never in two stages
        larger_bytes = shard_bytes * unit.shard.size // again.size
        yield _ring(unit, "gather again", "all_gather", again, larger_bytes, times)


def _reduce(unit: Unit, options: Options) -> Iterator[Stage]:
    shard_bytes = unit.reduce_itemsize * unit.shard_numel()
    times = unit.count * options.num_micro_steps
    if unit.shard.size == 1:
        return
    stages: list[Stage] = []
    if not _is_hierarchical(unit.shard, options):
        stages.append(_ring(unit, "reduce", "reduce_scatter", unit.shard, shard_bytes, times))
    else:
        across, within = split(unit.shard)
        into = times * unit.shard.num_nodes
        on_gloo = options.backend == "gloo"
        kind: Collective = "all_to_all" if on_gloo else "reduce_scatter"
        inside = _ring(unit, "reduce within the node", kind, within, shard_bytes, into)
        between = _ring(unit, "reduce between nodes", "reduce_scatter", across, shard_bytes, times)
        if on_gloo:  # a message to each peer, while the next block is reduced
            between = replace(between, collective="send", calls=times * (across.size - 1))
        stages += [replace(inside, blocks=unit.shard.num_nodes), between]
    for stage in stages:
        yield replace(stage, calls=stage.calls * unit.reduces)


def _boundary(units: Sequence[Unit], options: Options) -> Iterator[Stage]:
    """The second hop: every shard's all-reduce over its replication group, and the agreement.

    A message is counted at the first of the units that share it, in the order of the backward.
    """
    reduced = [unit for unit in units if unit.shapes]
    hopping = [unit for unit in reduced if unit.replicate.size > 1]
    messages = _messages(hopping, options)
    for unit in hopping:
        times = 1 if options.two_hop else options.num_micro_steps
        copies = unit.replicate.num_groups // unit.shard.size  # under tensor parallel, each its own
        total = unit.hop_itemsize * unit.numel * unit.count * copies * times
        calls = messages[unit] if options.two_hop else unit.count * times
        if options.two_hop and unit.update_itemsize is not None:
            yield from sliced_hop(
                unit.name,
                unit.replicate,
                total_bytes=total,
                updated_bytes=total // unit.hop_itemsize * unit.update_itemsize,
                calls=(calls, unit.count),
                in_stages=_is_hierarchical(unit.replicate, options),
                on_gloo=options.backend == "gloo",
            )
        elif options.two_hop and _is_hierarchical(unit.replicate, options):
            yield from _all_reduce_in_stages(unit, total, calls, options)
        else:
            yield _all_reduce(unit.name, "boundary", unit.replicate, total, calls, options)
    if not options.two_hop:
        return
    for mesh in dict.fromkeys((unit.shard, unit.replicate) for unit in reduced):
        params = sum(len(u.shapes) * u.count for u in reduced if (u.shard, u.replicate) == mesh)
        for group in mesh:
            if group.size > 1:
                total = 4 * (AGREEMENT_NUMBERS + params) * group.num_groups
                yield _all_reduce("(all)", "agreement", group, total, 1, options)


def _messages(hopping: Sequence[Unit], options: Options) -> dict[Unit, int]:
    """Messages at the boundary, by the unit that leads them."""
    led = dict.fromkeys(hopping, 0)
    for kind in dict.fromkeys(_message_of(unit) for unit in hopping):
        backward, sizes = list[Unit](), list[int]()
        for unit in reversed(hopping):
            if _message_of(unit) == kind:
                backward += [unit] * unit.count
                sizes += [unit.shard_numel() * unit.hop_itemsize] * unit.count
        for first, *_ in buckets(sizes, options.bucket_size_bytes):
            led[backward[first]] += 1
    return led


def _message_of(unit: Unit) -> tuple[object, ...]:
    """Units that differ in it share no message."""
    return unit.replicate, unit.hop_itemsize, unit.update_itemsize is None


def _is_hierarchical(group: GroupShape, options: Options) -> bool:
    return options.hierarchical and group.has_two_levels


def _ring(
    unit: Unit, name: str, collective: Collective, group: GroupShape, shard_bytes: int, times: int
) -> Stage:
    """All-gather or reduce-scatter: over each edge of the ring go size - 1 shards."""
    between, inside = edges(group)
    per_edge = (group.size - 1) * shard_bytes * group.num_groups * times
    return Stage(
        unit=unit.name,
        name=name,
        collective=collective,
        group=group,
        calls=times,
        inter_node_bytes=between * per_edge,
        intra_node_bytes=inside * per_edge,
        every_micro_step=True,
    )


def _all_reduce_in_stages(
    unit: Unit, total_bytes: int, calls: int, options: Options
) -> Iterator[Stage]:
    """The second hop where nodes hold several replicas: each node's sum crosses once."""
    across, within = split(unit.replicate)
    inside_bytes = (within.size - 1) * total_bytes * unit.replicate.num_nodes
    inside: tuple[tuple[str, Collective], ...] = (
        ("boundary: sum within the node", "reduce_scatter"),
        ("boundary: gather within the node", "all_gather"),
    )
    yield _all_reduce(unit.name, "boundary between nodes", across, total_bytes, calls, options)
    for name, collective in inside:
        yield Stage(
            unit=unit.name,
            name=name,
            collective=collective,
            group=within,
            calls=calls,
            inter_node_bytes=0,
            intra_node_bytes=inside_bytes,
            every_micro_step=False,
        )


def _all_reduce(
    unit: str, name: str, group: GroupShape, total_bytes: int, calls: int, options: Options
) -> Stage:
    """All-reduce of `total_bytes`, the messages of all groups of this shape together."""
    between, inside = edges(group)
    twice = 2 * (group.size - 1) * total_bytes
    return Stage(
        unit=unit,
        name=name,
        collective="all_reduce",
        group=group,
        calls=calls,
        inter_node_bytes=between * twice // group.size,
        intra_node_bytes=inside * twice // group.size,
        every_micro_step=not options.two_hop,
    )

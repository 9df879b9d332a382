"""What a micro-step sends inside the partition groups: gathers and reductions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.stage import Collective, Stage, edges, split
from mics_dtensor.plan.unit import Unit


def gathers(unit: Unit, options: Options) -> Iterator[Stage]:
    """The stages that bring a unit's parameters together, in the forward and in the backward."""
    shard_bytes = unit.gather_itemsize * (unit.shard_numel() + unit.shard_numel(frozen=True))
    again = unit.regather
    times = unit.count * (unit.gathers if again is None else 1) * options.num_micro_steps
    if unit.shard.size == 1:
        return
    if options.in_stages(unit.shard):
        across, _ = split(unit.shard)
        inside = _within(unit, "gather within the node", "all_gather", shard_bytes, times, options)
        at_once = options.backend == "gloo" and inside.calls == times
        if not at_once and options.backend == "gloo":  # the node's own block comes meanwhile
            inside = replace(inside, hidden_calls=times)
        kind: Collective = "all_to_all" if at_once else "all_gather"
        yield _ring(unit, "gather between nodes", kind, across, shard_bytes, times)
        yield inside
    else:
        yield _ring(unit, "gather", "all_gather", unit.shard, shard_bytes, times)
    if again is not None and again.size > 1:  # a group of other ranks: never in two stages
        larger_bytes = shard_bytes * unit.shard.size // again.size
        yield _ring(unit, "gather again", "all_gather", again, larger_bytes, times)


def reductions(unit: Unit, options: Options) -> Iterator[Stage]:
    """The stages that sum a unit's gradients over its partition group, message by message."""
    if unit.shard.size == 1:
        return
    for numel in unit.reduced_numels:
        yield from _reduction(unit, unit.reduce_itemsize * numel, options)


def _reduction(unit: Unit, shard_bytes: int, options: Options) -> Iterator[Stage]:
    times = unit.count * options.num_micro_steps
    if not options.in_stages(unit.shard):
        yield _ring(unit, "reduce", "reduce_scatter", unit.shard, shard_bytes, times)
        return
    across, _ = split(unit.shard)
    on_gloo = options.backend == "gloo"
    kind: Collective = "all_to_all" if on_gloo else "reduce_scatter"
    inside = _within(unit, "reduce within the node", kind, shard_bytes, times, options)
    between = _ring(unit, "reduce between nodes", kind, across, shard_bytes, times)
    if on_gloo and inside.calls > times:  # to each peer, while the next block is reduced
        between = replace(between, collective="send", calls=times * (across.size - 1))
        inside = replace(inside, hidden_calls=inside.calls - times)  # but for the first block
    yield inside
    yield between


def _within(
    unit: Unit, name: str, kind: Collective, shard_bytes: int, times: int, options: Options
) -> Stage:
    """Inside the node, where each rank has a shard of every node: block by block, or at once."""
    _, within = split(unit.shard)
    calls, blocks = options.calls_within(unit.shard, block_bytes=within.size * shard_bytes)
    bytes_each = shard_bytes * unit.shard.num_nodes // calls
    stage = _ring(unit, name, kind, within, bytes_each, times * calls)
    return replace(stage, blocks=blocks)


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

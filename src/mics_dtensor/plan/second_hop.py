"""What crosses the replicas, and in which messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.slices import sliced_hop
from mics_dtensor.plan.stage import Collective, Stage, edges, split
from mics_dtensor.plan.unit import Unit

AGREEMENT_NUMBERS = 3
"""int32 numbers of the agreement at the boundary, beside one a parameter."""


def boundary(units: Sequence[Unit], options: Options) -> Iterator[Stage]:
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
                in_stages=options.in_stages(unit.replicate),
                on_gloo=options.backend == "gloo",
            )
        elif options.two_hop and options.in_stages(unit.replicate):
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

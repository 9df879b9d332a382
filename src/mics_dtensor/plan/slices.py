"""The second hop where optimizer states are sharded over the replicas: both of its halves. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.stage import Collective, Stage, edges, split


def adam_bytes(shard_numel: int, *, num_replicas: int, itemsize: int | None) -> int:
    """Of a rank: weights, gradients and AdamW's states of a shard; `itemsize` None: not sliced.

    4 + 4 + 8 bytes an element; with slices 4 + 4 + 8/R, or, with shards of 16 bits, 2 + 4 + 12/R.
    """
    if itemsize is None:
        return 16 * shard_numel
    share = -(-shard_numel // num_replicas)
    return (itemsize + 4) * shard_numel + (8 if itemsize == 4 else 12) * share


def sliced_hop(
    unit: str,
    replicate: GroupShape,
    *,
    total_bytes: int,
    updated_bytes: int,
    calls: tuple[int, int],
    in_stages: bool,
    on_gloo: bool,
) -> Iterator[Stage]:
    """A reduce-scatter before the step, and an all-gather of the updated slices after it.

    `total_bytes` are the gradients of all groups together, `updated_bytes` their weights; `calls`
    the messages that this unit leads before the step, and those after it, which no unit shares.
    """
    before, after = calls
    reduce: Collective = "all_to_all" if on_gloo else "reduce_scatter"
    if not in_stages:
        yield _half(unit, "boundary: reduce to slices", reduce, replicate, total_bytes, before)
        yield _half(unit, "gather of slices", "all_gather", replicate, updated_bytes, after)
        return
    across, within = split(replicate)
    nodes = replicate.num_nodes
    yield _half(
        unit,
        "boundary: within the node",
        reduce,
        within,
        nodes * total_bytes,
        nodes * before,
    )
    between = _half(unit, "boundary: between nodes", "reduce_scatter", across, total_bytes, before)
    peers = across.size - 1  # on gloo a message to each
    yield replace(between, collective="send", calls=before * peers) if on_gloo else between
    yield _half(unit, "gather of slices between nodes", "all_gather", across, updated_bytes, after)
    yield _half(
        unit,
        "gather of slices within the node",
        "all_gather",
        within,
        nodes * updated_bytes,
        nodes * after,
    )


def _half(
    unit: str,
    name: str,
    collective: Collective,
    group: GroupShape,
    total_bytes: int,
    calls: int,
) -> Stage:
    """Half of an all-reduce of `total_bytes`, the messages of all groups of this shape together."""
    between, inside = edges(group)
    moved = (group.size - 1) * total_bytes
    return Stage(
        unit=unit,
        name=name,
        collective=collective,
        group=group,
        calls=calls,
        inter_node_bytes=between * moved // group.size,
        intra_node_bytes=inside * moved // group.size,
        every_micro_step=False,
    )

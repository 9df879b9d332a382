"""Units of traffic from the shapes of a preset, as torchtitan's `parallelize` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape, Layout
from mics_dtensor.plan.presets import HEAD, TABLE, Preset, UnitShapes
from mics_dtensor.plan.unit import Unit

COLUMNS = ("wqkv", "wq", "wk", "wv", "w1", "w3", "tok_embeddings", "lm_head")
ROWS = ("wo", "w2")
"""Tensor parallel cuts the first in dim 0 and the second in dim 1; norms are whole everywhere."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How units gather and reduce: bytes of an element, and what stays gathered."""

    gather_itemsize: int = 2
    reduce_itemsize: int = 4
    hop_itemsize: int = 4
    update_itemsize: int | None = None
    reshard_after_forward: str = "default"
    node_local_backward: bool = False
    chunked_loss: bool = True
    """torchtitan's ChunkedLossWrapper frees the unit of lm_head before its backward is over."""


def traffic_units(preset: Preset, layout: Layout, policy: Policy) -> tuple[Unit, ...]:
    """The FSDP units of a preset on a layout; PlanError where tensor parallel cuts experts."""
    return tuple(
        Unit(
            name=unit.name,
            count=unit.count,
            shapes=(*_shapes(unit, layout), *_repeated(unit, layout)),
            repeated=tuple(_repeated(unit, layout)),
            shard=layout.shard_shape,
            replicate=layout.replicate_shape,
            gathers=_gathers(unit, policy),
            regather=_regather(unit, layout, policy),
            gather_itemsize=policy.gather_itemsize,
            reduce_itemsize=policy.reduce_itemsize,
            hop_itemsize=policy.hop_itemsize,
            update_itemsize=policy.update_itemsize,
            reduced=_reduced(unit, layout, policy),
        )
        for unit in preset.units
    )


def _reduced(
    unit: UnitShapes, layout: Layout, policy: Policy
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The chunked loss reduces lm_head by itself, before the rest of its unit is ready.

    A tied table goes once for the head, and once more with the rest, for the embedding.
    """
    if HEAD not in unit.name or not policy.chunked_loss:
        return ()
    named = list(zip(unit.parameters, _shapes(unit, layout), strict=True))
    tied = not any(HEAD in name for (name, _), _ in named)
    of_head = tuple(cut for (name, _), cut in named if (TABLE if tied else HEAD) in name)
    rest = tuple(cut for (name, _), cut in named if tied or HEAD not in name)
    return of_head, rest


def _gathers(unit: UnitShapes, policy: Policy) -> int:
    """The last unit is used again at once: by default torchtitan leaves it gathered."""
    has_head = HEAD in unit.name
    reshards = policy.reshard_after_forward == "always"
    reshards |= policy.reshard_after_forward == "default" and not has_head
    return 1 + reshards + (has_head and policy.chunked_loss)


def _regather(unit: UnitShapes, layout: Layout, policy: Policy) -> GroupShape | None:
    """The ranks of one node, of a unit that is gathered across nodes and again for the backward."""
    shard = layout.shard_shape
    spans_nodes = shard.num_nodes > 1 and shard.ranks_per_node > 1
    reshards = policy.reshard_after_forward != "never" and HEAD not in unit.name
    if not (policy.node_local_backward and spans_nodes and reshards):
        return None
    return GroupShape(1, shard.ranks_per_node, shard.num_groups * shard.num_nodes)


def _repeated(unit: UnitShapes, layout: Layout) -> Iterator[tuple[int, ...]]:
    """A tied table once more: torchtitan cuts it for the embedding and for the head, ties both
    again when they are in their groups, and FSDP2 gathers and reduces each.
    """
    if layout.tensor_parallel_size > 1 and TABLE in unit.name and HEAD in unit.name:
        of_each = zip(unit.parameters, _shapes(unit, layout), strict=True)
        yield from (cut for (name, _), cut in of_each if name.startswith(TABLE))


def _shapes(unit: UnitShapes, layout: Layout) -> Iterator[tuple[int, ...]]:
    tp = layout.tensor_parallel_size
    for name, shape in unit.parameters:
        if "experts" in name:
            if tp > 1:
                raise PlanError("no shapes of experts under tensor parallel are known yet")
            # torchtitan cuts dim 1 where there are more shards than experts; FSDP pads that dim.
            if len(shape) > 1 and layout.partition_size > shape[0] and ".inner_experts." in name:
                shape = (shape[1], shape[0], *shape[2:])
        elif tp > 1:
            kind = name.removesuffix(".weight").rpartition(".")[2]
            if kind in COLUMNS:
                shape = (shape[0] // tp, *shape[1:])
            elif kind in ROWS:
                shape = (shape[0], shape[1] // tp)
        yield shape

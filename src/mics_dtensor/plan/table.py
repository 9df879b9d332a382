"""The table of a step's traffic, as text. One row a stage of a unit kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.traffic import Stage, Traffic, Unit

_HEADER = ("unit", "stage", "calls/step", "between nodes: /micro-step", "/step", "within: /step")


def render(units: Sequence[Unit], traffic: Traffic, plain_fsdp: Traffic) -> str:
    """The stages of `traffic`, like units in one row, beside what plain FSDP would send."""
    kinds = _kinds(units)
    rows = [_HEADER]
    for stage in _merge(traffic.stages, kinds):
        micro = stage.inter_node_bytes // traffic.num_micro_steps if stage.every_micro_step else 0
        rows.append(
            (
                stage.unit,
                stage.name,
                str(stage.calls),
                _bytes(micro) if stage.every_micro_step else "-",
                _bytes(stage.inter_node_bytes),
                _bytes(stage.intra_node_bytes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*_groups(units), "", *lines, "", *_totals(traffic, plain_fsdp)])


def _groups(units: Sequence[Unit]) -> list[str]:
    found: dict[tuple[GroupShape, GroupShape], None] = {(u.shard, u.replicate): None for u in units}
    return [
        f"partition groups: {_group(shard)}; replication groups: {_group(replicate)}"
        for shard, replicate in found
    ]


def _group(shape: GroupShape) -> str:
    if shape.size == 1:
        return "none (one rank each)"
    nodes = "one node" if shape.num_nodes == 1 else f"{shape.num_nodes} nodes"
    return f"{shape.num_groups} of {shape.size} ranks, {shape.ranks_per_node} in each of {nodes}"


def _totals(traffic: Traffic, plain: Traffic) -> list[str]:
    ours, theirs = traffic.inter_node_bytes, plain.inter_node_bytes
    ratio = f", {theirs / ours:.1f} x as much" if ours and theirs > ours else ""
    return [
        f"all nodes together, per optimizer step of {traffic.num_micro_steps} micro-steps:",
        f"  this run                   {_bytes(ours):>10} out of the nodes",
        f"  plain FSDP over all ranks  {_bytes(theirs):>10} out of the nodes{ratio}",
    ]


def _kinds(units: Sequence[Unit]) -> dict[str, str]:
    """A name for each kind of like units: layers.0 .. layers.31 become layers.*"""
    alike: dict[Unit, list[str]] = {}
    for unit in units:
        alike.setdefault(replace(unit, name=""), []).append(unit.name)
    kinds = {}
    for names in alike.values():
        for name in names:
            kinds[name] = names[0] if len(names) == 1 else f"{_common(names)} x {len(names)}"
    return kinds


def _common(names: Sequence[str]) -> str:
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return names[0]
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True))


def _merge(stages: Sequence[Stage], kinds: dict[str, str]) -> list[Stage]:
    merged: dict[tuple[str, str], Stage] = {}
    for stage in stages:
        unit = kinds.get(stage.unit, stage.unit)
        key = (unit, stage.name)
        had = merged.get(key)
        merged[key] = replace(
            stage,
            unit=unit,
            calls=stage.calls + (had.calls if had else 0),
            inter_node_bytes=stage.inter_node_bytes + (had.inter_node_bytes if had else 0),
            intra_node_bytes=stage.intra_node_bytes + (had.intra_node_bytes if had else 0),
        )
    return list(merged.values())


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"

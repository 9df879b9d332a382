"""The table of a step's traffic, as text: one block a kind of unit, one row a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.stage import Stage
from mics_dtensor.plan.traffic import Traffic
from mics_dtensor.plan.unit import Unit

Row = tuple[str, ...]

_HEADERS: tuple[Row, ...] = (
    ("", "", "calls", "between nodes", "", "inside nodes", ""),
    ("unit", "stage", "/step", "/micro-step", "/step", "/micro-step", "/step"),
)
_PLAIN = "(plain FSDP)"


def render(units: Sequence[Unit], traffic: Traffic, others: Mapping[str, Traffic]) -> str:
    """The stages of `traffic`, like units in one block, beside what `others` would send.

    `others` are traffics of the same units by name; the last is told unit by unit too.

    Calls are those of one rank; bytes are summed over the world. "shared": the message of another
    unit carries it.
    """
    kinds = _kinds(units)
    plain_fsdp = list(others.values())[-1]
    plain = _merge(plain_fsdp.stages, kinds)
    rows = list(_HEADERS)
    for kind, stages in _by_unit(_merge(traffic.stages, kinds)).items():
        its = [_row(stage, traffic.num_micro_steps) for stage in stages]
        theirs = [stage for stage in plain if stage.unit == kind]
        if theirs:
            its.append(_row(_total(theirs, name=_PLAIN), plain_fsdp.num_micro_steps))
        rows += [row if not number else ("", *row[1:]) for number, row in enumerate(its)]
    return "\n".join([*_groups(units, kinds), "", *_aligned(rows), "", *_totals(traffic, others)])


def _groups(units: Sequence[Unit], kinds: dict[str, str]) -> list[str]:
    """Who gathers and reduces with whom; units are named where they differ in it."""
    alike: dict[tuple[GroupShape, GroupShape], dict[str, None]] = {}
    for unit in units:
        alike.setdefault((unit.shard, unit.replicate), {})[kinds[unit.name]] = None
    lines = []
    for (shard, replicate), names in alike.items():
        if len(alike) > 1:
            lines.append(f"{', '.join(names)}:")
        lines += [
            f"partition groups:   {_group(shard)}",
            f"replication groups: {_group(replicate)}",
        ]
    return lines


def _group(shape: GroupShape) -> str:
    if shape.size == 1:
        return "none, every rank is alone"
    count = "1 group" if shape.num_groups == 1 else f"{shape.num_groups} groups"
    if shape.num_nodes == 1:
        return f"{count} of {shape.size} ranks, each inside one node"
    each = f"{shape.ranks_per_node} in each of {shape.num_nodes} nodes"
    return f"{count} of {shape.size} ranks, {each}"


def _row(stage: Stage, num_micro_steps: int) -> Row:
    links: list[str] = []
    for count in (stage.inter_node_bytes, stage.intra_node_bytes):
        every = _bytes(count // num_micro_steps) if stage.every_micro_step else "-"
        links += [every, _bytes(count)]
    return (stage.unit, stage.name, str(stage.calls) if stage.calls else "shared", *links)


def _aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _totals(traffic: Traffic, others: Mapping[str, Traffic]) -> list[str]:
    steps = traffic.num_micro_steps
    title = f"in all, per optimizer step of {steps} micro-step{'s'[: steps != 1]}"
    rows: list[Row] = [(title, "", "calls", "between nodes", "", "inside nodes")]
    for name, its in {"this run": traffic, **others}.items():
        ours, theirs = traffic.inter_node_bytes, its.inter_node_bytes
        ratio = f"{theirs / ours:.1f} x" if ours and its is not traffic else ""
        calls, inside = str(sum(its.collectives.values())), _bytes(its.intra_node_bytes)
        rows.append((f"  {name}", "", calls, _bytes(theirs), ratio, inside))
    return _aligned(rows)


def _kinds(units: Sequence[Unit]) -> dict[str, str]:
    """A name for each kind of like units: layers.0 .. layers.31 become layers.* x 32"""
    alike: dict[Unit, list[str]] = {}
    for unit in units:
        alike.setdefault(replace(unit, name=""), []).append(unit.name)
    kinds = {}
    for like, names in alike.items():
        count = len(names) * like.count
        label = names[0] if len(names) == 1 else _common(names)
        for name in names:
            kinds[name] = label if count == 1 else f"{label} x {count}"
    return kinds


def _common(names: Sequence[str]) -> str:
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return f"{names[0]} and like"
    return ".".join(p[0] if len(set(p)) == 1 else "*" for p in zip(*parts, strict=True))


def _merge(stages: Sequence[Stage], kinds: dict[str, str]) -> list[Stage]:
    """One stage for all like units."""
    merged: dict[tuple[str, str], list[Stage]] = {}
    for stage in stages:
        its = replace(stage, unit=kinds.get(stage.unit, stage.unit))
        merged.setdefault((its.unit, its.name), []).append(its)
    return [_total(alike, name=name) for (_, name), alike in merged.items()]


def _total(stages: Sequence[Stage], *, name: str) -> Stage:
    return replace(
        stages[0],
        name=name,
        calls=sum(stage.calls for stage in stages),
        inter_node_bytes=sum(stage.inter_node_bytes for stage in stages),
        intra_node_bytes=sum(stage.intra_node_bytes for stage in stages),
    )


def _by_unit(stages: Sequence[Stage]) -> dict[str, list[Stage]]:
    """The boundary beside the micro-step's stages of the same unit."""
    found: dict[str, list[Stage]] = {}
    for stage in stages:
        found.setdefault(stage.unit, []).append(stage)
    return found


def _bytes(count: int) -> str:
    if not count:
        return "0"
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"

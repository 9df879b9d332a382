"""The page of all results: `python -m benchmarks.report` writes benchmarks/results/README.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import aims, blocks, crossover, scaling

FOLDER = Path(__file__).parent / "results"

# gloo's reduce-scatter moves an all-reduce, twice what a true one would. The systems whose
# reductions between nodes are FSDP2's or DeepSpeed's own pay for it.
_KEEPS = "deepspeed-zero3"
_REDUCES_BY_GLOO = (
    "fsdp2",
    "hsdp",
    "mics-no-hierarchy",
    "deepspeed-zero3",
    "deepspeed-zero3-reuse0",
)


def page(folder: Path = FOLDER) -> str:
    """Markdown, of every results.json in `folder`, in the order of their names."""
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.report` from the JSON files beside it. What is measured",
        "and how stands in [docs/benchmarks.md](../../docs/benchmarks.md).",
    ]
    for name, paths in groupby(
        sorted(folder.glob("*.json")), key=lambda path: path.name.split(".")[0]
    ):
        launches = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        lines += ["", f"## {name}", "", *_section(launches)]
    return "\n".join(lines) + "\n"


def _section(launches: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of one file; or of several launches of the same, NAME.1.json and on."""
    first = launches[0]
    if "modes" in first:
        yield from _memory(first)
    elif "ratios" in first:
        yield from _saving(first)
    elif module := next((m for key, m in _MODULES.items() if key in first), None):
        yield from _description(first)
        yield ""
        yield from module.section(first)
    elif len(launches) > 1:
        yield from _description(first)
        yield ""
        yield from aims.medians(launches)
        yield from aims.told(launches)
        yield from _stages(first)
    else:
        yield from _description(first)
        yield from _systems(first)
        yield from _stages(first)


def _description(results: dict[str, Any]) -> Iterator[str]:
    its, versions = results["configuration"], results["versions"]
    place = (
        f"{its['num_nodes']} nodes of {its['ranks_per_node']} ranks, {its['rate'] or 'no limit'}"
    )
    when = f"{results['date']}, commit `{results['commit'][:12]}`"
    where = f"{results['host']}, {results['cores']} cores"
    what = ", ".join(f"{package} {version}" for package, version in versions.items())
    yield f"{place} a node; {json.dumps(its['workload'])}. {when}; {where}; {what}."


def _systems(results: dict[str, Any]) -> Iterator[str]:
    if any(row["num_quiet"] == 0 for row in results["rows"]):
        yield ""
        yield (
            "Other processes used the machine in every repetition of some systems: read the bytes, "
            "which do not depend on it, and not the times."
        )
    yield ""
    yield "| system | partition nodes | s/step (min, max) | quiet | MB out of a node | over bound |"
    yield "|---|---|---|---|---|---|"
    for row in results["rows"]:
        yield _row(row)


def _stages(results: dict[str, Any]) -> Iterator[str]:
    if not any(row["stages"] for row in results["rows"]):
        return
    yield ""
    yield "Bytes out of a node over the bound, stage by stage, in MB (one step, counted apart):"
    yield ""
    yield "| system | partition nodes | forward | backward | reduction | boundary |"
    yield "|---|---|---|---|---|---|"
    for row in results["rows"]:
        if row["stages"]:
            cells = [_stage(row["stages"][stage]) for stage in _STAGES]
            yield f"| {row['system']} | {row['partition_nodes']:g} | {' | '.join(cells)} |"
    computed = [
        f"{row['system']} over {row['partition_nodes']:g} {ratio:.2f}"
        for row in results["rows"]
        if (ratio := _with_true_reduce_scatter(row)) is not None
    ]
    if computed:
        yield ""
        yield (
            "gloo's reduce-scatter moves the bytes of an all-reduce. **Computed**, not measured: "
            f"over the bound with one that moves half of that: {', '.join(computed)}."
        )


def _memory(results: dict[str, Any]) -> Iterator[str]:
    """Of `benchmarks.sharded_memory`."""
    its = results["configuration"]
    yield (
        f"{its['ranks']} CPU ranks, {its['replicas']} replicas, {results['num_parameters']:,} "
        f"parameters under AdamW (`python -m benchmarks.sharded_memory`). {results['date']}, "
        f"commit `{results['commit'][:12]}`; {results['host']}, "
        f"torch {results['versions']['torch']}."
    )
    yield ""
    yield "| a rank, MB | AdamW's moments | peak | fell by | predicted | ratio |"
    yield "|---|---|---|---|---|---|"
    for mode, each in results["modes"].items():
        cells = [
            each["state_bytes"],
            each["peak_bytes"],
            each["fell_bytes"],
            each["predicted_bytes"],
        ]
        ratio = f"{cells[2] / cells[3]:.3f}" if cells[3] else ""
        told = [f"{cell / 1e6:.1f}" for cell in cells[: 4 if cells[3] else 2]]
        yield f"| {mode} | {' | '.join([*told, *[''] * (4 - len(told)), ratio])} |"


def _saving(results: dict[str, Any]) -> Iterator[str]:
    """Of `benchmarks.checkpoints`."""
    its, seconds = results["configuration"], results["seconds"]
    yield (
        f"{its['ranks']} CPU ranks, {results['bytes'] / 1e6:,.0f} MB of weights and moments "
        f"(`python -m benchmarks.checkpoints`), {its['repeat']} repetitions. {results['date']}, "
        f"commit `{results['commit'][:12]}`; {results['host']}, {results['cores']} cores, load "
        f"{results['load_average']:.1f} before; torch {results['versions']['torch']}."
    )
    yield ""
    yield "| | s, median (min, max) |"
    yield "|---|---|"
    for name, each in seconds.items():
        middle = statistics.median(each)
        yield f"| {name} | {middle:.2f} ({min(each):.2f}, {max(each):.2f}) |"
    yield ""
    yield "| ratio, median of those of each repetition | |"
    yield "|---|---|"
    for name, ratio in results["ratios"].items():
        yield f"| {name} | {ratio:.2f} |"


_MODULES: dict[str, Any] = {"launches": scaling, "sizes": crossover, "blocks": blocks}
_STAGES = ("forward", "backward", "reduction", "boundary")


def _row(row: dict[str, Any]) -> str:
    sent, bound = row["inter_node_bytes_per_step"], row["inter_node_bytes_bound"]
    time = f"{row['seconds_median']:.2f} ({row['seconds_min']:.2f}, {row['seconds_max']:.2f})"
    return (
        f"| {row['system']} | {row['partition_nodes']:g} | {time} "
        f"| {row['num_quiet']} of {len(row['seconds'])} | {sent / 1e6:.2f} | {sent / bound:.4f} |"
    )


def _stage(stage: dict[str, int]) -> str:
    sent, bound = stage["inter_node_bytes"], stage["bound"]
    if sent < 20_000:
        return "0"
    return f"{sent / 1e6:.2f}" + (f" / {bound / 1e6:.2f} = {sent / bound:.4f}" if bound else "")


def _with_true_reduce_scatter(row: dict[str, Any]) -> float | None:
    """The ratio that would be left; None where no reduction of gloo's crosses nodes."""
    if row["system"] not in _REDUCES_BY_GLOO or not row["stages"]:
        return None
    reduction = row["stages"]["reduction"]["inter_node_bytes"]
    if row["system"].startswith("deepspeed"):  # its backward: gathers as many as in the forward
        again = row["stages"]["forward"]["inter_node_bytes"] if row["system"] != _KEEPS else 0
        reduction = row["stages"]["backward"]["inter_node_bytes"] - again
    if reduction < 20_000:
        return None
    left: float = row["inter_node_bytes_per_step"] - reduction / 2
    return left / row["inter_node_bytes_bound"]


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")

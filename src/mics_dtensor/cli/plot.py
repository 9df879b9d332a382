"""Pictures of the planner's answers; the only place that needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mics_dtensor.errors import PlanError
from mics_dtensor.plan.report import terms_of
from mics_dtensor.plan.scaling import Scaling
from mics_dtensor.plan.search import Answer, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HEADROOM = 1.1  # above the highest bar or line


def plot_answer(answer: Answer, path: Path, *, title: str = "") -> None:
    """Seconds of a step by term, one bar a row; those that do not fit are pale."""
    figure = _figure()
    axes = figure.subplots()
    names = ["FSDP" if r.variant.plain else str(r.variant.partition_size) for r in answer.rows]
    floor = [0.0] * len(names)
    for number, term in enumerate(terms_of(answer.rows)):
        heights = [getattr(row.time, f"{term}_s") for row in answer.rows]
        axes.bar([names[0]], [0.0], color=f"C{number}", label=term.replace("_", " "))
        bars = axes.bar(names, heights, bottom=floor, color=f"C{number}")
        for bar, row in zip(bars, answer.rows, strict=True):
            bar.set_alpha(1.0 if row.fits else 0.25)
        floor = [low + high for low, high in zip(floor, heights, strict=True)]
    for bar, row in zip(bars, answer.rows, strict=True):
        above = (bar.get_x() + bar.get_width() / 2, row.step_s)
        axes.annotate(mark_of(answer, row), above, ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, HEADROOM * max(floor))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    axes.set_xlabel("partition size (pale: does not fit)")
    axes.set_ylabel("seconds of an optimizer step")
    figure.legend(loc="outside right center")
    _save(figure, path)


def mark_of(answer: Answer, row: Row) -> str:
    """What stands above a bar."""
    if row is answer.best:
        return "best"
    return "tie" if any(row is tied for tied in answer.ties) else ""


def plot_scaling(scaling: Scaling, path: Path, *, title: str = "") -> None:
    """tokens/s of a GPU over the number of GPUs, one line a partition size."""
    figure = _figure()
    from matplotlib import colormaps  # after _figure, which says what to install

    axes = figure.subplots()
    marked: dict[str, dict[str, Any]] = {
        "best": {"linewidth": 4, "color": "0.7"},
        "plain FSDP": {"color": "red", "linestyle": "--"},
    }
    highest = 0.0
    for number, (name, points) in enumerate(scaling.curves.items()):
        found = [(p.num_nodes, p.tokens_per_s(scaling.ranks_per_node)) for p in points]
        there = [(n * scaling.ranks_per_node, speed) for n, speed in found if speed is not None]
        if there:
            gpus, speeds = zip(*there, strict=True)
            shade = colormaps["viridis"](number / len(scaling.curves))
            style = marked.get(name, {"color": shade})
            axes.plot(gpus, speeds, marker=".", label=name, **style)
            highest = max(highest, *speeds)
    axes.set_xscale("log", base=2)
    gpus_of = [nodes * scaling.ranks_per_node for nodes in scaling.nodes]
    axes.set_xticks(gpus_of, [str(gpus) for gpus in gpus_of])
    axes.minorticks_off()
    axes.set_ylim(0, HEADROOM * highest)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s of a GPU")
    figure.legend(title="partition size", loc="outside right center")
    _save(figure, path)


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            "--plot needs matplotlib: pip install matplotlib; or leave --plot out"
        ) from None
    return Figure(figsize=(9, 5), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    if path.is_dir():
        raise PlanError(f"--plot {path} is a folder; give a file, such as out.png")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path}: {error}") from None

"""Draws all figures into docs/figures: `python -m scripts.figures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mics_dtensor.layout import Layout
from mics_dtensor.topology import Topology
from scripts.figures import mesh, stages, timeline, traffic
from scripts.figures.drawing import Drawing

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
LAYOUT = Layout(topology=Topology.uniform(world_size=8, ranks_per_node=2), partition_size=4)
"""Four nodes of two ranks; a partition group spans two nodes."""

FIGURES: Mapping[str, Callable[[], Drawing]] = {
    "mesh": lambda: mesh.draw(LAYOUT),
    "stages": lambda: stages.draw(LAYOUT),
    "timeline": lambda: timeline.draw(LAYOUT),
    "step": traffic.draw_step,
    "partition_sizes": traffic.draw_partition_sizes,
}


def main() -> None:
    """Writes every figure."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()

"""A figure as SVG text: boxes, lines, arrows and words, on white, so that it reads on any page."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Literal

SHARDS = ("#bcd9f5", "#c9e8bf", "#fbdcae", "#f1c3d6")
"""A colour for each shard, for the figures that tell shards apart."""
SLOW, FAST, REPLICAS = "#1f6fb2", "#3c8d40", "#c2542d"
"""Between nodes; inside a node; over the replication group."""
INK, PALE, LINE = "#24292f", "#f3f5f8", "#b8c0cc"

Anchor = Literal["start", "middle", "end"]


@dataclass
class Drawing:
    """`width` x `height` in pixels; `title` is what a screen reader says."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, at: tuple[float, float], size: tuple[float, float], *, fill: str, dashed: bool = False
    ) -> None:
        """A rectangle with its upper left corner at `at`."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        (x, y), (width, height) = at, size
        radius = min(6, width / 4, height / 4)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{LINE}"{dash}/>'
        )

    def bar(self, at: tuple[float, float], size: tuple[float, float], *, fill: str) -> None:
        """A rectangle without an edge, for a quantity."""
        (x, y), (width, height) = at, size
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
        )

    def words(
        self,
        at: tuple[float, float],
        said: str,
        *,
        anchor: Anchor = "start",
        size: int = 13,
        fill: str = INK,
    ) -> None:
        """One line of text, its baseline at `at`."""
        x, y = at
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{fill}">{escape(said)}</text>'
        )

    def line(self, path: str, *, stroke: str, dashed: bool = False, arrows: bool = False) -> None:
        """A path of SVG; `arrows` at both ends."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        name = stroke.removeprefix("#")
        heads = f' marker-start="url(#{name})" marker-end="url(#{name})"' if arrows else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="2"{dash}{heads}/>'
        )

    def __str__(self) -> str:
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            f'markerHeight="6" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
            f'fill="#{name}"/></marker>'
            for name in (colour.removeprefix("#") for colour in (SLOW, FAST, REPLICAS))
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{heads}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def amount(num_bytes: float) -> str:
    """A number of bytes as people say it: 0.96 TB, 8.2 GB."""
    if not num_bytes:
        return "0"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.1 * size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"

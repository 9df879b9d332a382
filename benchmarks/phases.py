"""Where in a step a rank is: what the bytes between two marks are counted under."""

from __future__ import annotations

from benchmarks.line import Line


class Phases:
    """Tells the launcher, where it counts stage by stage; silent while a step is timed."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.counting = False
        self._now = "before"

    @property
    def now(self) -> str:
        """The phase that runs: "forward", "backward", "boundary" or "optimizer"."""
        return self._now

    def begin(self, phase: str) -> None:
        """What has been sent since the last mark belongs to the phase that ends here."""
        self.mark(self._now)
        self._now = phase

    def mark(self, label: str) -> None:
        """Count what has been sent since the last mark under `label`. Every rank calls it."""
        if self.counting:
            self._line.mark(label)

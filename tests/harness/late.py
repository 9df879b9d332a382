"""Updated slices that arrive as late as they may."""

from __future__ import annotations

from typing import Any

import pytest

from mics_dtensor.slices import SlicesGathered


def hold_back(patch: pytest.MonkeyPatch) -> None:
    """The messages' contents arrive only when they are waited for: the worst that can happen.

    Until then the shards of the other replicas hold NaN.
    """
    start, wait = SlicesGathered.__init__, SlicesGathered.wait

    def started(self: Any, slices: Any, *, group: Any, async_op: bool = False, **more: Any) -> None:
        self.held = None
        start(self, slices, group=group, async_op=False, **more)
        if async_op:
            rows = self._rows
            wait(self)
            self._rows = rows
            shards = [its.param.local.view(-1) for its in slices]
            self.held = [(its, at, at.clone()) for its, at in zip(slices, shards, strict=True)]
            for its, at, _ in self.held:
                first, last = its.mine
                at[:first] = at[last:] = float("nan")

    def waited(self: Any) -> None:
        for _, at, right in self.held or []:
            at.copy_(right)
        wait(self)

    patch.setattr(SlicesGathered, "__init__", started)
    patch.setattr(SlicesGathered, "wait", waited)

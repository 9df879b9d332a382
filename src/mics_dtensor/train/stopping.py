"""Who wants the machine back: SIGTERM, or Ctrl-C, heard by some ranks, agreed on by all."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Whether this run is to end after the step it is in.

    A scheduler may signal one rank, the ranks of one node, or all of them, at different moments. So
    every step each rank says whether it has heard one, and reads what all had said a step
    before: the number is on its way meanwhile, and no rank waits for it. All ranks stop after the
    same step, at most two after the signal.
    """

    def __init__(self) -> None:
        self.heard = False
        self._said: tuple[torch.Tensor, torch.cuda.Event | dist.Work] | None = None

    def listen(self) -> None:
        """From now on SIGTERM and SIGINT are a request, not an end. In the main thread; for good: a
        scheduler may repeat itself while the checkpoint is written, or while the process leaves.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def agreed(self, device: torch.device) -> bool:
        """Whether some rank had heard it a step ago. Collective over the world, once a step."""
        before, self._said = self._said, self._say(device)
        if before is None:
            return False
        everyone, arrived = before
        if isinstance(arrived, dist.Work):
            arrived.wait()
        else:
            arrived.synchronize()
        return bool(everyone.item())

    def _say(self, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | dist.Work]:
        said = torch.tensor(int(self.heard), dtype=torch.int32, device=device)
        if device.type == "cpu":
            work: dist.Work = dist.all_reduce(said, op=dist.ReduceOp.MAX, async_op=True)
            return said, work
        # In the order of the stream, before the gathers of the next step: messages of several
        # groups that overtake each other can lock NCCL up.
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        on_host = torch.empty((), dtype=torch.int32, pin_memory=True)
        on_host.copy_(said, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return on_host, arrived

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.heard = True

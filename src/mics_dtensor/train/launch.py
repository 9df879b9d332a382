"""What the launcher told this process, and how the ranks agree to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from mics_dtensor.errors import ConfigError, MicsError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among those that torchrun started."""

    rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """From torchrun's variables. Raises ConfigError where they are missing."""
        try:
            return cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the ranks must be started by torchrun, but its variable {error} is not there; "
                "for four ranks on this machine: torchrun --nproc-per-node 4 -m mics_dtensor.train "
                "--config-file train_configs/debug.toml"
            ) from None


def agreed(question: Callable[[], Result]) -> Result:
    """The answer to `question` on this rank, if it has one on every rank.

    Collective over the world. Raises the first rank's error on every rank, so that none goes on to
    wait for one that stopped: a file may be missing on one node alone.
    """
    answer: list[Result] = []
    error: MicsError | None = None
    try:
        answer.append(question())
    except MicsError as raised:
        error = raised
    told: list[tuple[type[MicsError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else (type(error), str(error)))
    for rank, refusal in enumerate(told):
        if refusal is not None:
            kind, words = refusal
            everywhere = all(told)
            raise kind(words if everywhere else f"{words} (on rank {rank})")
    return answer[0]


def say_and_stop(error: MicsError, *, rank: int) -> int:
    """Print the sentence once, from rank 0; the exit status of every rank."""
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1

"""What the launcher told this process, and how a process ends that was refused."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mics_dtensor.errors import ConfigError, MicsError

Environ = MutableMapping[str, str]

WAIT_FOR_RANK_0_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among those that torchrun started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """From torchrun's variables. Raises ConfigError where they are missing."""
        try:
            return cls(
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the ranks must be started by torchrun, but its variable {error} is not there; "
                "for four ranks on this machine: torchrun --nproc-per-node 4 -m mics_dtensor.train "
                "--config-file train_configs/debug.toml"
            ) from None


def configure_logging(*, rank: int, rank_of_loss: int = 0, environ: Environ | None = None) -> None:
    """Log as torchtitan does; from ranks that LOG_RANK does not list, errors alone.

    By default these are rank 0, and the one of a pipeline that knows the loss. torchtitan reads the
    variable too, so that it is written where it is not set.
    """
    from torchtitan.tools.logging import init_logger

    environ = os.environ if environ is None else environ
    default = "0" if rank_of_loss == 0 else f"0,{rank_of_loss}"
    init_logger()
    if str(rank) not in environ.setdefault("LOG_RANK", default).split(","):
        logging.getLogger().setLevel(logging.ERROR)


def say_and_stop(error: MicsError, *, rank: int, local_rank: int) -> int:
    """Print the sentence once, from rank 0; the exit status of every rank.

    torchrun ends all ranks as soon as one has ended: the others wait until rank 0 has spoken. Where
    it had nothing to say (a file that is missing on one node alone), that node's first rank does.
    """
    if rank != 0:
        time.sleep(WAIT_FOR_RANK_0_S)
    if rank == 0 or (local_rank == 0 and not dist.is_initialized()):
        print(f"error: {error}", file=sys.stderr, flush=True)
    _tell_torchrun(str(error))
    return 1


def _tell_torchrun(sentence: str, environ: Mapping[str, str] = os.environ) -> None:
    """Let the report with which torchrun ends show the sentence, where it has nothing to show.

    torchrun prints a traceback of its own whenever a rank ends with another status than 0.
    """
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"py_callstack": f"error: {sentence}", "timestamp": str(int(time.time()))}
        message = {"message": {"message": sentence, "extraInfo": told}}
        Path(path).write_text(json.dumps(message), encoding="utf-8")

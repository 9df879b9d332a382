"""What ranks tell each other around a checkpoint; one process without a group is a world of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mics_dtensor.errors import CheckpointError, MicsError

Value = TypeVar("Value")


def rank_here() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_on_gpus() -> bool:
    """Whether the group of the world speaks through GPUs."""
    return dist.is_initialized() and "gloo" not in dist.get_backend()


def gathered(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Of every rank its value. Collective."""
    if not dist.is_initialized():
        return [value]
    found: list[Value] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def told(value: Value, *, source: int) -> Value:
    """The value of rank `source`. Collective."""
    if not dist.is_initialized():
        return value
    said = [value]
    dist.broadcast_object_list(said, src=source)
    return said[0]


def agreed(question: Callable[[], Value]) -> Value:
    """The answer of this rank, if every rank has one. Collective.

    Else the first rank's error, on every rank: none goes on to wait for one that has stopped.
    """
    answer: list[Value] = []
    error: Exception | None = None
    try:
        answer.append(question())
    except Exception as raised:
        error = raised
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    for said in gathered(None if error is None else (kind, words_of(error))):
        if said is not None:
            raise said[0](said[1])
    return answer[0]


def words_of(error: BaseException) -> str:
    """One sentence: ours as it is, another's with its kind."""
    if isinstance(error, MicsError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

"""What all ranks tell each other; one process without a group is a world of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mics_dtensor.errors import CommunicationError, MicsError

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


def agreed(question: Callable[[], Value], *, others_as: type[MicsError] | None = None) -> Value:
    """The answer to `question` on this rank, if every rank has one. Collective over the world.

    Else an error on every rank, so that none goes on to wait for one that stopped: a file may be
    missing on one node alone. A MicsError is the first rank's, which it names unless that is rank 0
    or all have one. An error of another kind is told as an `others_as`; without, its rank raises
    it, and the others a CommunicationError that names it.
    """
    answer: list[Value] = []
    error: Exception | None = None
    refusal: tuple[type[MicsError], str] | None = None
    try:
        answer.append(question())
    except MicsError as raised:
        refusal = type(raised), str(raised)
    except Exception as raised:
        error = raised
        said = words_of(raised)
        refusal = (others_as, said) if others_as else (CommunicationError, f"a rank failed: {said}")
    told = gathered(refusal)
    if error is not None and others_as is None:
        raise error
    for rank, its in enumerate(told):
        if its is not None:
            kind, words = its
            names_it = rank != 0 and not all(told)
            raise kind(f"{words} (on rank {rank})" if names_it else words) from error
    return answer[0]


def words_of(error: BaseException) -> str:
    """One sentence: ours as it is, another's with its kind."""
    if isinstance(error, MicsError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

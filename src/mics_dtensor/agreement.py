"""What all ranks of a model agree on before the second hop: micro-steps, health, who has what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mics_dtensor.errors import AccumulationError


@dataclass(frozen=True, eq=False)
class Ballot:
    """What this rank says to the others of one data-parallel mesh."""

    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    device: torch.device
    present: tuple[bool, ...]  # of each gradient of the mesh, in order


def agree(
    ballots: Sequence[Ballot], *, num_micro_steps: int, problem: str | None
) -> list[list[bool]]:
    """For each ballot, which gradients some replica has. Collective over its two groups.

    Two messages a mesh, of three numbers in the partition group and of one more a parameter over
    the replication group: a maximum over both reaches every rank of the mesh. On CUDA the host
    reads them, once per optimizer step. Raises AccumulationError, on every rank and before any
    gradient is sent, if one rank has a problem or ranks ran different numbers of micro-steps.
    """
    said = [num_micro_steps, -num_micro_steps, int(problem is not None)]
    for ballot in ballots:
        said = _maximum(said, ballot.shard_group, ballot.device)
    present: list[list[bool]] = []
    for ballot in ballots:
        numbers = [*said, *(int(has) for has in ballot.present)]
        numbers = _maximum(numbers, ballot.replicate_group, ballot.device)
        said, having = numbers[: len(said)], numbers[len(said) :]
        present.append([bool(has) for has in having])
    most, least, sick = said[0], -said[1], bool(said[2])
    if problem is not None:
        raise AccumulationError(problem)
    if sick:
        raise AccumulationError(
            "another rank cannot take part in the second hop, and says why in its own error; no "
            "gradient was sent"
        )
    if most != least:
        raise AccumulationError(
            f"this rank ran {num_micro_steps} micro-steps, but ranks ran from {least} to {most}; "
            "run the same number on every rank (no gradient was sent)"
        )
    return present


def _maximum(
    numbers: list[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[int]:
    if group is None or group.size() == 1:
        return numbers
    message = torch.tensor(numbers, dtype=torch.int32, device=device)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in message.tolist()]

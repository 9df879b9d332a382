"""What all ranks of a model agree on at the boundary: micro-steps, health, who has what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mics_dtensor.errors import AccumulationError
from mics_dtensor.stage import ALL_UNITS, stage


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

    Two messages a mesh, of three numbers and one more a parameter, in the partition group and over
    the replication group: a maximum over both reaches every rank of the mesh. On CUDA the host
    reads them. Raises AccumulationError, on every rank, if one rank has a problem or ranks ran
    different numbers of micro-steps.
    """
    said = [num_micro_steps, -num_micro_steps, int(problem is not None)]
    present = [[int(has) for has in ballot.present] for ballot in ballots]
    for hop in ("shard_group", "replicate_group"):
        for position, ballot in enumerate(ballots):
            numbers = [*said, *present[position]]
            numbers = _maximum(numbers, getattr(ballot, hop), ballot.device)
            said, present[position] = numbers[: len(said)], numbers[len(said) :]
    most, least, sick = said[0], -said[1], bool(said[2])
    if problem is not None:
        raise AccumulationError(problem)
    if sick:
        raise AccumulationError(
            "another rank cannot take part in the second hop, and says why in its own error; no "
            ".grad was changed"
        )
    if most != least:
        raise AccumulationError(
            f"this rank ran {num_micro_steps} micro-steps, but ranks ran from {least} to {most}; "
            "run the same number on every rank (no .grad was changed)"
        )
    return [[bool(has) for has in having] for having in present]


def _maximum(
    numbers: list[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[int]:
    if group is None or group.size() == 1:
        return numbers
    message = torch.tensor(numbers, dtype=torch.int32, device=device)
    with stage("boundary: agreement", ALL_UNITS, group):
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in message.tolist()]

"""The flat tensors of all ranks: fp32 weights and optimizer states, by rank and sub-group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mics_dtensor.checkpoint.convert.flat_parameter import FlatParameter
from mics_dtensor.checkpoint.convert.lazy import LazyTensor
from mics_dtensor.errors import CheckpointError

FP32 = "fp32"
STEP = "step"


@dataclass(frozen=True)
class RankStates:
    """One rank's optimizer file: its weights and its states, one a sub-group."""

    path: Path
    weights: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    group_of: Sequence[int]

    @classmethod
    def read(cls, path: Path, of_optimizer: Mapping[str, Any], stage: int) -> RankStates:
        """From the file's optimizer_state_dict. Raises CheckpointError for another format."""
        keys = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if stage == 3
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        if absent := [key for key in keys if key not in of_optimizer]:
            raise CheckpointError(
                f"{path} lacks {', '.join(absent)}, where ZeRO-{stage} of DeepSpeed 0.16 to 0.19 "
                "keeps weights and moments; another version wrote it, or a script cut it down: "
                "load it in DeepSpeed 0.16 to 0.19 and save_checkpoint() once"
            )
        weights, base = of_optimizer[keys[0]], of_optimizer[keys[1]]
        if not isinstance(base, dict):
            raise CheckpointError(
                f"{path} was saved with zero_optimization.elastic_checkpoint, whose optimizer "
                "states are cut otherwise; save once without it"
            )
        # An optimizer numbers what its groups hold in the order of the groups, as sub-groups are.
        order = [(g, at) for g, group in enumerate(base["param_groups"]) for at in group["params"]]
        if len(order) != len(weights):
            raise CheckpointError(
                f"{path} has {len(weights)} flat weights and an optimizer of {len(order)}; it is "
                "not a checkpoint of ZeRO as DeepSpeed 0.16 to 0.19 writes it"
            )
        states = [base["state"].get(at, {}) for _, at in order]
        return cls(path, weights, states, base["param_groups"], [group for group, _ in order])


class FlatStates:
    """All ranks together. Raises CheckpointError where they are not of one save."""

    def __init__(self, ranks: Sequence[RankStates], sizes: Sequence[int] | None) -> None:
        self._ranks = ranks
        first = ranks[0]
        for rank in ranks:
            if self._steps_of(rank) != self._steps_of(first) or rank.group_of != first.group_of:
                raise CheckpointError(
                    f"{rank.path} and {first.path.name} are of different optimizer steps, "
                    f"{self._steps_of(rank)} and {self._steps_of(first)}: two saves lie in one "
                    "folder; take another checkpoint"
                )
            for sub_group, numel in enumerate(sizes or ()):
                self._check_size(rank, sub_group, numel)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The states that have a value for every element of every parameter: Adam's moments."""
        found = [self._elementwise(self._ranks[0], at) for at in range(self.num_sub_groups)]
        return tuple(kind for kind in found[0] if all(kind in each for each in found))

    @property
    def num_sub_groups(self) -> int:
        """Flat tensors of a rank."""
        return len(self._ranks[0].weights)

    def lazy(self, parameter: FlatParameter, kind: str) -> LazyTensor:
        """The parameter's weights (FP32) or one of its states."""

        def flat(rank: int, sub_group: int) -> torch.Tensor:
            its = self._ranks[rank]
            found = its.weights if kind == FP32 else [each[kind] for each in its.states]
            return found[sub_group].detach().reshape(-1)

        dtype = flat(0, parameter.sub_group).dtype
        return LazyTensor(parameter.shape, dtype, lambda: parameter.assembled(flat))

    def step_of(self, parameter: FlatParameter) -> float | None:
        """Steps that the optimizer has made on it; None where no step was made."""
        return self._steps_of(self._ranks[0])[parameter.sub_group]

    def options(self, parameters: Sequence[FlatParameter]) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters under "params"."""
        first = self._ranks[0]
        return [
            {key: value for key, value in group.items() if key not in ("params", STEP)}
            | {"params": [p.name for p in parameters if first.group_of[p.sub_group] == number]}
            for number, group in enumerate(first.groups)
        ]

    def left_behind(self) -> Iterator[str]:
        """States that are not carried over, each with its reason."""
        names = {name for state in self._ranks[0].states for name in state}
        for name in sorted(names - set(self.kinds) - {STEP}):
            yield f"optimizer state {name}: it is not one value for every element of a parameter"

    @staticmethod
    def _steps_of(rank: RankStates) -> list[float | None]:
        steps: list[float | None] = []
        for state, group in zip(rank.states, rank.group_of, strict=True):
            step = state.get(STEP, rank.groups[group].get(STEP) if state else None)
            steps.append(None if step is None else float(step))
        return steps

    @staticmethod
    def _elementwise(rank: RankStates, sub_group: int) -> dict[str, torch.Tensor]:
        numel = rank.weights[sub_group].numel()
        return {
            name: value
            for name, value in rank.states[sub_group].items()
            if torch.is_tensor(value) and value.dim() > 0 and value.numel() >= numel
        }

    def _check_size(self, rank: RankStates, sub_group: int, numel: int) -> None:
        found = {FP32: rank.weights[sub_group], **self._elementwise(rank, sub_group)}
        for kind, tensor in found.items():
            if tensor.numel() != numel:
                raise CheckpointError(
                    f"{rank.path} has {tensor.numel()} elements of {kind} in sub-group "
                    f"{sub_group}, and the shapes in the model files want {numel} on each of "
                    f"{len(self._ranks)} ranks: the files are not of one save; take another "
                    "checkpoint"
                )

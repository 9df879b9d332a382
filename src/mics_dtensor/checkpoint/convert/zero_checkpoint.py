"""A checkpoint of DeepSpeed's ZeRO-1, 2, 3 or MiCS, read without DeepSpeed.

The fp32 weights and the moments lie in the optimizer files, whatever dtype the model trained in;
names, shapes, buffers and frozen parameters lie in the model files. Source: DeepSpeed 0.16 to 0.19,
`runtime/zero/stage3.py` and `stage_1_and_2.py` (`state_dict`), `runtime/engine.py`
(`_save_checkpoint`) and `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mics_dtensor.checkpoint.convert.flat_parameter import (
    FlatParameter,
    pieces_of_stage_1_and_2,
    pieces_of_stage_3,
)
from mics_dtensor.checkpoint.convert.flat_states import FP32, FlatStates, RankStates
from mics_dtensor.checkpoint.convert.lazy import LazyTensor
from mics_dtensor.checkpoint.convert.unpickling import load_restricted
from mics_dtensor.checkpoint.convert.zero_folder import ZeroFolder
from mics_dtensor.checkpoint.convert.zero_progress import Progress, left_behind
from mics_dtensor.errors import CheckpointError

Read = Mapping[str, Any]
"""What a file of torch.save holds."""


@dataclass(frozen=True, kw_only=True)
class ZeroCheckpoint:
    """What a checkpoint holds; tensors are lazy. Made by `open`.

    `weights`: trained parameters in fp32, by the name that the optimizer knows. `frozen`, `buffers`
    and `tied` (name: the weight that it shares) complete the model's state dict. `moments`: by
    state ("exp_avg") and parameter; none before the first step. `steps`: the optimizer's, by
    parameter.
    `options`: the optimizer's groups, the names of their parameters under "params".
    `decouples_weight_decay`: AdamW, where the groups do not say. `left_behind`: what is not carried
    over, each with its reason.
    """

    path: Path
    files: Sequence[Path]
    stage: int
    world_size: int
    version: str
    weights: Mapping[str, LazyTensor]
    frozen: Mapping[str, LazyTensor]
    tied: Mapping[str, str]
    buffers: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    steps: Mapping[str, float]
    options: Sequence[Mapping[str, Any]]
    decouples_weight_decay: bool
    progress: Progress
    left_behind: Sequence[str]

    @classmethod
    def open(cls, path: Path, *, inert: Sequence[str] = ()) -> ZeroCheckpoint:
        """Reads names and shapes; values stay in the files. Raises CheckpointError."""
        folder = ZeroFolder.find(path)
        models = [load_restricted(file, inert=inert) for file in folder.model_files]
        files = [load_restricted(file, inert=inert) for file in folder.optimizer_files]
        found = [_of_optimizer(file, at) for file, at in _zip(files, folder.optimizer_files)]
        stage = _stage(found[0], folder)
        _check(models, found, folder, stage)
        ranks = [RankStates.read(at, of, stage) for at, of in _zip(folder.optimizer_files, found)]
        parameters, sizes = _parameters(models[0], found, stage, folder)
        flat = FlatStates(ranks, sizes)
        weights = {each.name: flat.lazy(each, FP32) for each in parameters}
        tied, buffers = dict(models[0]["shared_params"] or {}), models[0]["buffer_names"]
        steps = {each.name: flat.step_of(each) for each in parameters}
        return cls(
            path=folder.path,
            files=(*folder.model_files, *folder.optimizer_files),
            stage=stage,
            world_size=len(ranks),
            version=str(files[0].get("ds_version", "unknown")).strip(),
            weights=weights,
            frozen=_frozen(models, stage, known={*weights, *tied, *buffers}),
            tied=tied,
            buffers={name: _kept(models[0]["module"][name]) for name in buffers},
            moments={
                kind: {each.name: flat.lazy(each, kind) for each in parameters}
                for kind in flat.kinds
            },
            steps={name: step for name, step in steps.items() if step is not None},
            options=flat.options(parameters),
            decouples_weight_decay=_decouples_weight_decay(models[0].get("ds_config")),
            progress=Progress.of(models[0], len(ranks)),
            left_behind=[*flat.left_behind(), *left_behind(models[0], found[0])],
        )

    def model(self) -> dict[str, LazyTensor]:
        """The state dict of the model, tied names included."""
        whole = {**self.weights, **self.frozen, **self.buffers}
        return whole | {name: whole[source] for name, source in self.tied.items()}


def _zip(some: Sequence[Any], others: Sequence[Any]) -> Any:
    return zip(some, others, strict=True)


def _of_optimizer(file: Any, path: Path) -> Read:
    if isinstance(file, dict) and isinstance(found := file.get("optimizer_state_dict"), dict):
        return found
    raise CheckpointError(
        f"{path} is not an optimizer file of ZeRO: it has no optimizer_state_dict"
    )


def _stage(states: Read, folder: ZeroFolder) -> int:
    """1, 2 or 3. MiCS writes 3, and the optimizer that is ZeRO-1 for bf16 writes none."""
    of_bf16 = 1 if "single_partition_of_fp32_groups" in states else None
    if (stage := states.get("zero_stage", of_bf16)) not in (1, 2, 3):
        raise CheckpointError(
            f"{folder.path} is of ZeRO stage {stage}; stages 1, 2 and 3 (and MiCS) are converted"
        )
    return int(stage)


def _check(models: Sequence[Any], states: Sequence[Read], folder: ZeroFolder, stage: int) -> None:
    """The files are DeepSpeed's, of one save and of all ranks, and of dense parameters."""
    wanted = ("module", "buffer_names", "param_shapes", "shared_params")
    for model, path in _zip(models, folder.model_files):
        absent = [key for key in wanted if not isinstance(model, dict) or model.get(key) is None]
        if absent:
            raise CheckpointError(f"{path} is not a model file of ZeRO: it lacks {absent}")
        if model.get("ds_autoep_layers") or model.get("autoep_layers"):
            raise CheckpointError(f"{path} holds experts of AutoEP, which are not converted")
        if model.get("global_steps") != models[0].get("global_steps"):
            raise CheckpointError(
                f"{path} is of step {model.get('global_steps')} and {folder.model_files[0].name} "
                f"of step {models[0].get('global_steps')}: two saves lie in one folder"
            )
    if states[0].get("ds_zero_partition_groups"):
        raise CheckpointError(f"{folder.path} holds experts of AutoEP, which are not converted")
    for state, path in _zip(states, folder.optimizer_files):
        counts = state.get("partition_count")
        if any(
            count != len(states) for count in (counts if isinstance(counts, list) else [counts])
        ):
            raise CheckpointError(
                f"{path} was saved by {counts} ranks, and {folder.path} has the files of "
                f"{len(states)}; copy the rest from the nodes that wrote them"
            )
    if stage == 3 and len(models) != len(states):
        raise CheckpointError(
            f"{folder.path} has {len(states)} optimizer files and {len(models)} model files; "
            "ZeRO-3 writes one of each a rank"
        )


def _parameters(
    model: Read, states: Sequence[Read], stage: int, folder: ZeroFolder
) -> tuple[list[FlatParameter], list[int] | None]:
    shapes = [
        {name: torch.Size(shape) for name, shape in of_group.items()}
        for of_group in model["param_shapes"]
    ]
    if stage == 3:
        return pieces_of_stage_3(shapes, len(states))
    mappings = [
        state["param_slice_mappings"] for state in states if "param_slice_mappings" in state
    ]
    if len(mappings) < len(states):
        raise CheckpointError(
            f"{folder.path} lacks param_slice_mappings, which ZeRO-{stage} of DeepSpeed 0.16 to "
            "0.19 writes; load it in one of these and save_checkpoint() once"
        )
    return pieces_of_stage_1_and_2(shapes, mappings), None


def _frozen(models: Sequence[Read], stage: int, *, known: set[str]) -> dict[str, LazyTensor]:
    """Parameters that the optimizer does not know, in the dtype that the model had."""
    if stage < 3:
        module = models[0]["module"]
        return {name: _kept(tensor) for name, tensor in module.items() if name not in known}
    shapes = models[0].get("frozen_param_shapes") or {}
    return {name: _joined(models, name, torch.Size(shape)) for name, shape in shapes.items()}


def _joined(models: Sequence[Read], name: str, shape: torch.Size) -> LazyTensor:
    pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
    if sum(piece.numel() for piece in pieces) < shape.numel():
        raise CheckpointError(f"{name} (frozen) has fewer elements in the files than its shape")
    return LazyTensor(
        shape, pieces[0].dtype, lambda: torch.cat(pieces)[: shape.numel()].view(shape)
    )


def _decouples_weight_decay(config: Any) -> bool:
    """DeepSpeed's "Adam" is AdamW too, unless adam_w_mode is false."""
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    return bool(params.get("adam_w_mode", True)) if isinstance(params, dict) else True


def _kept(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor)

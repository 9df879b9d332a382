"""A DeepSpeed checkpoint as one of ours: the states that a run or a script resumes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mics_dtensor.checkpoint.commit import abandon, begin, commit, partial_of
from mics_dtensor.checkpoint.convert.dcp_writer import write_dcp
from mics_dtensor.checkpoint.convert.lazy import LazyTensor, LazyTensors, Translation, translated
from mics_dtensor.checkpoint.convert.member_crc import refuse_damaged
from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint
from mics_dtensor.checkpoint.manifest import Manifest, files_of, versions
from mics_dtensor.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that say how a step is computed: those of the new run stay."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the states are for. The default is a script, which keeps its names.

    For a run of the program `translation` turns names and layouts of the model's state dict into
    the run's own, and `of_moments` those of the optimizer's parameters; `check` raises where the
    shapes by name are not the run's model. `seq_len`: tokens of a sample, where known. `options`:
    how the optimizer computes its step, which is not the checkpoint's to decide. `config`: the run,
    for the manifest.
    """

    translation: Translation | None = None
    of_moments: Translation | None = None
    check: Callable[[Mapping[str, torch.Size]], None] | None = None
    seq_len: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None


def write_resumable(found: ZeroCheckpoint, path: Path, target: Target) -> Manifest:
    """Writes the checkpoint `path`, which must not exist; complete, with a manifest, or not at all.

    One process; the tensors of one file, and of one layer, are in memory at a time. Raises
    CheckpointError, for a damaged file before anything is written.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists; name a folder that does not, nothing is overwritten")
    states = resumable_states(found, target)
    refuse_damaged(found.files)
    try:
        begin(path)
    except FileExistsError:
        raise CheckpointError(
            f"{partial_of(path)} is in the way: another conversion writes it, or one was stopped; "
            "delete it if none does"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    try:
        write_dcp(partial_of(path), states)
        names = [file.name for file in partial_of(path).iterdir()]
        manifest = Manifest(
            step=found.progress.step,
            contents="training" if found.moments else "model",
            files=files_of(partial_of(path), names),
            tokens=_tokens(found, target),
            versions=versions("torch") | {"deepspeed": found.version},
            config=target.config,
        )
        return commit(path, manifest)
    except OSError as error:
        abandon(path)
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    except BaseException:
        abandon(path)
        raise


def resumable_states(found: ZeroCheckpoint, target: Target) -> dict[str, Any]:
    """The model by its names; "optimizer", flat, as torch's state_dict functions flatten it.

    And "lr_scheduler" and "train_state" as torchtitan's trainer keeps them. Raises CheckpointError.
    """
    model = _by(target.translation, found.model())
    if target.check is not None:
        target.check({name: tensor.shape for name, tensor in model.items()})
    states: dict[str, Any] = dict(model)
    if taken := {"optimizer", "lr_scheduler", "train_state"} & states.keys():
        raise CheckpointError(f"the model has a parameter called {taken.pop()}: rename it")
    if found.moments:
        states["optimizer"] = _optimizer(found, target)
    states["lr_scheduler"] = {"last_epoch": found.progress.schedule_steps}
    tokens = _tokens(found, target) or 0
    states["train_state"] = {
        "step": found.progress.step,
        "ntokens_seen": tokens // found.progress.data_parallel_size,  # torchtitan's is a rank's own
    }
    return states


def _tokens(found: ZeroCheckpoint, target: Target) -> int | None:
    return None if target.seq_len is None else found.progress.samples * target.seq_len


def _by(translation: Translation | None, tensors: LazyTensors) -> dict[str, LazyTensor]:
    return dict(tensors) if translation is None else translated(tensors, translation)


def _optimizer(found: ZeroCheckpoint, target: Target) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for kind, moments in found.moments.items():
        for name, moment in _by(target.of_moments, moments).items():
            flat[f"state.{name}.{kind}"] = moment
    group_of = {name: number for number, its in enumerate(found.options) for name in its["params"]}
    for name, sources in _sources(found.weights, target.of_moments).items():
        step = _only(name, {found.steps[source] for source in sources})
        flat[f"state.{name}.step"] = torch.tensor(step, dtype=torch.float32)
        group = found.options[_only(name, {group_of[source] for source in sources})]
        for key, value in {**_options(found, group), **target.options}.items():
            flat[f"param_groups.{name}.{key}"] = value
    return flat


def _only(name: str, values: set[Any]) -> Any:
    if len(values) > 1:
        raise CheckpointError(
            f"{name} is made of several parameters that DeepSpeed's optimizer had in different "
            "groups, or took another number of steps on; here it is one: give --weights-only"
        )
    return next(iter(values))


def _options(found: ZeroCheckpoint, group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group that change results, completed by what torch's AdamW here knows."""
    its = {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION)}
    if set(found.moments) != set(MOMENTS):
        return its
    adam = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    known = {key: value for key, value in adam.items() if key not in ("params", *IMPLEMENTATION)}
    more = {"decoupled_weight_decay": found.decouples_weight_decay, "initial_lr": its.get("lr")}
    return known | more | its


def _sources(tensors: LazyTensors, translation: Translation | None) -> dict[str, set[str]]:
    """By translated name, the names it is made of: each comes in filled with its own number."""
    if translation is None:
        return {name: {name} for name in tensors}
    names = list(tensors)

    def numbered(number: int, shape: torch.Size) -> LazyTensor:
        value = torch.tensor(float(number))  # expanded: a tensor of any size in four bytes
        return LazyTensor(shape, value.dtype, lambda: value.expand(shape))

    marked = {name: numbered(number, tensors[name].shape) for number, name in enumerate(names)}
    found = translated(marked, translation)
    return {name: {names[n] for n in _numbers(its.read())} for name, its in found.items()}


def _numbers(tensor: torch.Tensor) -> set[int]:
    """The whole numbers in a tensor, few of them and in long stretches."""
    flat = tensor.flatten()
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    return {int(value) for value in flat[starts]}

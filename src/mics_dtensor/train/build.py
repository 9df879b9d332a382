"""torchtitan 0.3.0's Trainer.Config from a run: the rows of keys_0_2.toml, walked.

A row without `by` is a plain assignment; the few that are more are the functions below. torchtitan
is imported when the first of them is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at, value_at
from mics_dtensor.train.known import OPTIMIZERS, unknown_optimizer, unknown_option
from mics_dtensor.train.load import Run
from mics_dtensor.train.loss_chunks import num_loss_chunks
from mics_dtensor.train.param_groups import options_of
from mics_dtensor.train.rows import rows
from mics_dtensor.train.values import shown

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

SPMD_TYPES_SINCE = (2, 14)
"""The first torch that torchtitan's spmd_types and full_dtensor work with."""


def trainer_config(run: Run, *, device_type: Literal["cpu", "cuda"]) -> Trainer.Config:
    """The Trainer.Config of a resolved run, from `model_registry`, never from `config_registry`.

    On CPU attention becomes DenseAttention, the same function. Raises ConfigError for what
    torchtitan, the model or the installed torch cannot do.
    """
    from torchtitan.trainer import Trainer

    from mics_dtensor.train import data
    from mics_dtensor.train.model import use_attention_of_cpu
    from mics_dtensor.train.model_limits import refuse_limits
    from mics_dtensor.train.weights import refuse_lost_weights

    config = run.config
    values: dict[str, Any] = {"tokenizer": data.tokenizer_config(config)}
    for row in rows().values():
        if row.to is None or row.to in values:
            continue
        if row.by is not None:
            values[row.to] = CONVERSIONS[row.by](config)
        elif not row.is_off(config):
            values[row.to] = unfrozen(value_at(config, row.key))
    if device_type == "cpu":
        use_attention_of_cpu(values["model_spec"])
    try:
        tables = {
            name: made(**_below(values, name)) for name, made in _tables_of_torchtitan().items()
        }
        plain = {name: value for name, value in values.items() if "." not in name}
        made = Trainer.Config(**tables, **plain)
    except (ValueError, AssertionError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"torchtitan refuses this configuration: {error}") from error
    refuse_limits(made, config)
    refuse_lost_weights(config)
    return made


def unfrozen(value: Any) -> Any:
    """Tuples as lists, at every depth: torchtitan's tables hold lists."""
    return [unfrozen(each) for each in value] if isinstance(value, tuple) else value


def _below(values: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The values of one table of torchtitan, by the last part of their path."""
    start = f"{table}."
    return {name.removeprefix(start): v for name, v in values.items() if name.startswith(start)}


def _tables_of_torchtitan() -> dict[str, Callable[..., Any]]:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config.configs import (
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.config.override import OverrideConfig
    from torchtitan.tools.profiler import Profiler

    return {
        "training": TrainingConfig,
        "parallelism": ParallelismConfig,
        "compile": CompileConfig,
        "comm": CommConfig,
        "debug": DebugConfig,
        "override": OverrideConfig,
        "profiler": Profiler.Config,
        "metrics": MetricsProcessor.Config,
        "lr_scheduler": LRSchedulersContainer.Config,
        "checkpoint": CheckpointManager.Config,
    }


def _model_spec(config: RunConfig) -> Any:
    from mics_dtensor.train.model import model_spec

    return model_spec(config)


def _hf_assets_path(config: RunConfig) -> str:
    """As 0.2.2, which let the older name win where both are written."""
    return config.model.tokenizer_path or config.model.hf_assets_path


def _optimizer(config: RunConfig) -> Any:
    """One group for all parameters, after the groups that the file names."""
    from torchtitan.components.optimizer import ParamGroupConfig

    from mics_dtensor.train.optimizer import GroupedOptimizers, SlicedOptimizers

    written = config.optimizer
    if written.name not in OPTIMIZERS:
        raise unknown_optimizer(written.name)
    groups = [
        ParamGroupConfig(
            pattern=group["pattern"],
            optimizer_name=group.get("optimizer_name", written.name),
            optimizer_kwargs=options_of(group, written),
        )
        for group in (*written.param_groups, {"pattern": ".*"})
    ]
    if config.mics.optimizer_over_replicas:
        return SlicedOptimizers.Config(
            param_groups=groups,
            implementation=written.implementation,
            master_weights=config.mics.master_weights,
            overlap_update=config.mics.overlap_update,
        )
    return GroupedOptimizers.Config(param_groups=groups, implementation=written.implementation)


def _activation_checkpoint(config: RunConfig) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    from mics_dtensor.train.block_checkpointing import EveryNthBlockAC

    written = config.activation_checkpoint
    common: dict[str, Any] = {
        "preserve_rng_state": written.preserve_rng_state,
        "determinism_check": written.determinism_check,
        "debug": written.debug,
    }
    if written.mode == "none":
        return None
    if written.mode == "full":
        return FullAC.Config(**common)
    if written.mode == "memory_budget":
        return MemoryBudgetAC.Config(
            memory_budget=written.memory_budget,
            visualize_memory_budget_pareto=written.visualize_memory_budget_pareto,
            **common,
        )
    option = written.selective_ac_option
    if option == "op":
        shapes = list(written.per_op_sac_force_recompute_mm_shapes_by_fqns)
        return SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=shapes, **common)
    if not option.isdecimal():
        raise unknown_option(option)
    # 0.2.2 took 0 for "every block".
    return EveryNthBlockAC.Config(every=max(1, int(option)), **common)


def _loss(config: RunConfig) -> Any:
    """Cross-entropy, its logits made slice by slice where the sequence can be cut."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from mics_dtensor.train.model import vocab_size

    whole = CrossEntropyLoss.Config(global_vocab_size=vocab_size(config))
    chunks = num_loss_chunks(config)
    return whole if chunks == 1 else ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=whole)


def _dataloader(config: RunConfig, *, carries_position: bool = True) -> Any:
    from mics_dtensor.train import data

    loader = config.training.dataloader
    return replace(
        data.dataloader_config(config, carries_position=carries_position),
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
    )


def _validator(config: RunConfig) -> Any:
    from mics_dtensor.train.validation import OwnSizeValidator

    written = config.validation
    for name in ("dataset", "dataset_path", "dataloader"):
        config = replace_at(config, f"training.{name}", getattr(written, name))
    return OwnSizeValidator.Config(
        enable=written.enable,
        freq=written.freq,
        steps=written.steps,
        dataloader=_dataloader(config, carries_position=False),
        own_local_batch_size=written.local_batch_size,
        own_seq_len=written.seq_len,
    )


def _initial_load_path(config: RunConfig) -> str | None:
    """Absolute, as 0.3.0 wants it; what has a scheme (s3://) is left alone."""
    path = config.checkpoint.initial_load_path
    return path if not path or "://" in path else str(Path(path).absolute())


def _module_fqns(config: RunConfig) -> list[list[str]] | None:
    stages = config.parallelism.module_fqns_per_model_part
    if stages is None:
        return None
    return [["lm_head" if name == "output" else name for name in stage] for stage in stages]


def _spmd_backend(config: RunConfig) -> str:
    """What the file says; else torchtitan's own default where the installed torch can do it."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    written = config.parallelism.spmd_backend
    if version >= SPMD_TYPES_SINCE:
        return written or "spmd_types"
    if written in (None, "partial_dtensor"):
        return "partial_dtensor"
    raise ConfigError(
        f"parallelism.spmd_backend = {shown(written)} needs torch 2.14 or newer; torch "
        f'{torch.__version__} is installed: delete the line, or write "partial_dtensor"'
    )


CONVERSIONS: Mapping[str, Callable[[RunConfig], Any]] = {
    "model_spec": _model_spec,
    "hf_assets_path": _hf_assets_path,
    "optimizer": _optimizer,
    "activation_checkpoint": _activation_checkpoint,
    "loss": _loss,
    "dataloader": _dataloader,
    "validator": _validator,
    "initial_load_path": _initial_load_path,
    "module_fqns_per_model_part": _module_fqns,
    "spmd_backend": _spmd_backend,
}

"""What a model cannot do with degrees and dtype of a run, said before ranks make meshes and memory.

torchtitan finds these while it builds its trainer, as tracebacks of every rank.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import MoE
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.trainer import Trainer

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import divisors
from mics_dtensor.plan.tensor_parallel import tied_slices, uneven_heads
from mics_dtensor.train import device_shim
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.known import fp32_experts
from mics_dtensor.train.lengths import refuse_lengths
from mics_dtensor.train.optimizer import SlicedOptimizers
from mics_dtensor.train.param_groups import refuse_idle


def refuse_limits(config: Trainer.Config, written: RunConfig) -> None:
    """Raises ConfigError where the model of `config` cannot be cut, or computed, as it says.

    `written`: the run that `config` was made from.
    """
    _refuse_dtype(config)
    flex = config.model_spec.model.traverse(FlexAttention.Config)
    refuse_lengths(written, in_blocks=any(True for _ in flex))
    _refuse_heads(config)
    _refuse_tied_slices(config)
    _refuse_experts(config)
    model = copy.deepcopy(config.model_spec.model)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    try:
        model.update_from_config(config=config)
        _refuse_idle_patterns(config, model)
        if config.parallelism.pipeline_parallel_degree > 1:
            _refuse_stages(config, model)
    except (ValueError, NotImplementedError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"torchtitan refuses {config.model_spec.name}: {error}") from error


def _refuse_dtype(config: Trainer.Config) -> None:
    training, spec = config.training, config.model_spec
    if "bfloat16" in (training.dtype, training.mixed_precision_param):
        return
    if any(True for _ in spec.model.traverse(GptOssGroupedExperts.Config)):
        raise fp32_experts(spec.name)


def _refuse_heads(config: Trainer.Config) -> None:
    spec, degree = config.model_spec, config.parallelism.tensor_parallel_degree
    attention = getattr(spec.model, "first_attention", None)
    if degree == 1 or attention is None:
        return
    heads = attention.n_heads
    key_value_heads = getattr(attention, "n_kv_heads", None) or heads
    why = uneven_heads(degree, num_heads=heads, num_key_value_heads=key_value_heads)
    if why is not None:
        raise ConfigError(f"{spec.name} {spec.flavor}: {why}")


def _refuse_tied_slices(config: Trainer.Config) -> None:
    spec = config.model_spec
    why = tied_slices(
        config.parallelism.tensor_parallel_degree,
        is_tied=getattr(spec.model, "enable_weight_tying", False),
        over_replicas=isinstance(config.optimizer, SlicedOptimizers.Config),
    )
    if why is not None:
        raise ConfigError(f"{spec.name} {spec.flavor}: {why}")


def _refuse_experts(config: Trainer.Config) -> None:
    ep, spec = config.parallelism.expert_parallel_degree, config.model_spec
    if ep == 1:
        return
    experts = {moe.num_experts for _, moe, *_ in spec.model.traverse(MoE.Config)}
    if not experts:
        raise ConfigError(
            f"parallelism.expert_parallel_degree {ep}: {spec.name} {spec.flavor} has no experts; "
            "delete the line"
        )
    for num in experts:
        if num % ep:
            raise ConfigError(
                f"parallelism.expert_parallel_degree {ep} does not divide the {num} experts of "
                f"{spec.name} {spec.flavor}; choose from {divisors(num)}"
            )


def _refuse_idle_patterns(config: Trainer.Config, model: Any) -> None:
    """Of the tables of optimizer.param_groups; the last one takes the rest."""
    spec, tables = config.model_spec, config.optimizer.param_groups[:-1]
    if not tables:
        return
    with torch.device("meta"):
        names = [name for name, its in model.build().named_parameters() if its.requires_grad]
    refuse_idle([its.pattern for its in tables], names, f"{spec.name} {spec.flavor}")


def _refuse_stages(config: Trainer.Config, model: Any) -> None:
    """The stages that torchtitan would cut, or those that the file names."""
    written = config.parallelism
    if config.model_spec.pipelining_fn is None:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree {written.pipeline_parallel_degree}: "
            f"{config.model_spec.name} has no pipelining_fn in its ModelSpec; delete the line"
        )
    ranks = written.pipeline_parallel_degree
    usual, stages = device_shim.stages_of_pipeline(SimpleNamespace(pp=ranks), written, model)
    if len(stages) % ranks or (usual == ranks and len(stages) != ranks):
        raise ConfigError(
            f"parallelism.module_fqns_per_model_part names {len(stages)} stages for {ranks} ranks "
            f"of {written.pipeline_parallel_schedule}; name {usual}"
        )
    named = [name for stage in stages for name in stage]
    blocks = [f"layers.{i}" for i in range(len(model.layers))]
    missing = [name for name in ("tok_embeddings", *blocks, "norm", "lm_head") if name not in named]
    if missing:
        raise ConfigError(
            f"parallelism.module_fqns_per_model_part leaves out {', '.join(missing)}: the model "
            "would train without; name every module once"
        )

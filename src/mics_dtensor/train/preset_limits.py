"""What a model of torchtitan cannot do with the degrees and dtype of a run, known by its preset.

For `mics explain`, which has no model; the program asks the model itself (model_limits.py). The
sentences are the same. Pure.
"""

from __future__ import annotations

from contextlib import suppress

from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.plan.presets import MODELS, Preset, preset
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.plan.tensor_parallel import tied_slices, uneven_heads
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.known import fp32_experts, too_many_blocks
from mics_dtensor.train.lengths import refuse_lengths


def refuse_by_preset(config: RunConfig) -> None:
    """Raises ConfigError where the program would; of a user's own model its sequences alone."""
    name, training = config.model.name, config.training
    # Attention of torchtitan's models, where context parallel can cut it, has masks of blocks.
    refuse_lengths(config, in_blocks=name in MODELS)
    if name not in MODELS:
        return
    if name == "gpt_oss" and "bfloat16" not in (training.dtype, training.mixed_precision_param):
        raise fp32_experts(name)
    model = preset(name, config.model.flavor)
    has, wanted = sum(u.count for u in model.units if "layers" in u.name), config.model.n_layers
    if wanted is not None and name != "llama3" and wanted > has:
        raise too_many_blocks(wanted, name, model.flavor, has)
    _refuse_cut(config, model)


def _refuse_cut(config: RunConfig, model: Preset) -> None:
    """Of tensor parallel."""
    degree = config.parallelism.tensor_parallel_degree
    why = None
    with suppress(PlanError):  # heads of experts' models are not known here
        shape = shape_of(model)
        heads, key_value_heads = shape.num_heads, shape.num_key_value_heads
        why = uneven_heads(degree, num_heads=heads, num_key_value_heads=key_value_heads)
    why = why or tied_slices(
        degree, is_tied=model.is_tied, over_replicas=config.mics.optimizer_over_replicas
    )
    if why is not None:
        raise ConfigError(f"{model.model} {model.flavor}: {why}")

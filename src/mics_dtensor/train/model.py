"""The ModelSpec of a run: torchtitan's registry, or that of the user's own module."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.plan.presets import MODELS
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.known import (
    no_registry,
    too_many_blocks,
    unknown_flavor,
    unknown_model,
)
from mics_dtensor.train.values import shown

QKV = ("wq", "wk", "wv")
"""Three products in 0.2.2, one in 0.3.0's models with grouped queries."""

AUTO_FILTER = "auto_filter_small_kn"
"""No name of a module: torchao leaves out what is too small to gain."""


def model_spec(config: RunConfig) -> Any:
    """The model's configuration and what parallelizes it. Raises ConfigError."""
    module = _module(config.model.name)
    spec = _from_registry(module, config)
    if converters := _converters(config, spec):
        spec = _from_registry(module, config, converters=converters)
    if config.model.n_layers is not None:
        set_num_layers(spec, config.model.n_layers)
    return spec


def vocab_size(config: RunConfig) -> int | None:
    """Entries of the model's vocabulary, where its configuration says so."""
    spec = _from_registry(_module(config.model.name), config)
    return getattr(spec.model, "vocab_size", None)


def _module(name: str) -> ModuleType:
    if name in MODELS:
        return importlib.import_module(f"torchtitan.models.{name}")
    if "." not in name:
        raise unknown_model(name, MODELS)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"[model] name = {shown(name)} cannot be imported ({error}); it must be a module that "
            "Python finds, with model_registry(flavor, ...)"
        ) from error
    if not callable(getattr(module, "model_registry", None)):
        raise no_registry(name)
    return module


def _from_registry(module: ModuleType, config: RunConfig, **converters: Any) -> Any:
    """model_registry(flavor, ...) with the options that the run sets."""
    model, parallelism = config.model, config.parallelism
    options = {
        "attn_backend": (model.attn_backend, None),
        "tp_gemm_backend": (model.tp_gemm_backend, "default"),
        "num_mtp_layers": (model.num_mtp_layers, 0),
        "non_blocking_capacity_factor": (model.non_blocking_capacity_factor, None),
        "moe_comm_backend": (parallelism.expert_parallel_comm_backend, "standard"),
    }
    set_here = {name: value for name, (value, default) in options.items() if value != default}
    registry: Callable[..., Any] = module.model_registry
    takes = inspect.signature(registry).parameters
    for name, value in (set_here | converters).items():
        if name not in takes:
            raise ConfigError(
                f"{name} = {shown(value)}: {module.__name__}.model_registry has no such option; it "
                f"takes {', '.join(takes)}"
            )
    try:
        return registry(model.flavor, **set_here, **converters)
    except KeyError:
        raise unknown_flavor(model.flavor, module.__name__, _flavors(module)) from None
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"{module.__name__} refuses {shown(model.flavor)}: {error}") from error


def _flavors(module: ModuleType) -> list[str]:
    tables = [vars(module)[name] for name in vars(module) if name.endswith("_configs")]
    return [flavor for table in tables if isinstance(table, dict) for flavor in table]


def _converters(config: RunConfig, spec: Any) -> list[Any]:
    from torchtitan.components import quantization

    names, quantize = config.model.converters, config.quantize
    compiled = config.compile.enable and "model" in config.compile.components
    made: list[Any] = []
    if "quantize.linear.float8" in names:
        float8 = quantize.linear.float8
        made.append(
            quantization.Float8LinearConverter.Config(
                recipe_name=float8.recipe_name or "rowwise",  # none only with emulate, unused then
                filter_fqns=_filter_fqns(float8.filter_fqns, spec),
                emulate=float8.emulate,
                model_compile_enabled=compiled,
            )
        )
    if "quantize.linear.mx" in names:
        # 0.2.2 lists what stays, 0.3.0 what is converted; rows let only these two through.
        fqns = ["layers"] if quantize.linear.mx.filter_fqns else []
        made.append(
            quantization.MXFP8LinearConverter.Config(fqns=fqns, model_compile_enabled=compiled)
        )
    if "quantize.grouped_mm.float8" in names and quantize.grouped_mm.float8.fqns:
        made.append(
            quantization.Float8GroupedExpertsConverter.Config(model_compile_enabled=compiled)
        )
    if "quantize.grouped_mm.mx" in names and quantize.grouped_mm.mx.fqns:
        made.append(
            quantization.MXFP8GroupedExpertsConverter.Config(model_compile_enabled=compiled)
        )
    return made


def _filter_fqns(written: tuple[str, ...], spec: Any) -> list[str]:
    """The names of 0.2.2 as those of 0.3.0: output, and the three products that became one."""
    from torchtitan.models.common.linear import Linear

    linears = [fqn for fqn, *_ in spec.model.traverse(Linear.Config)]
    fused = any("qkv_linear.wqkv" in fqn for fqn in linears)
    names, parts = [], set()
    for name in written:
        if name == AUTO_FILTER:
            names.append(name)
        elif fused and name.removeprefix("attention.") in QKV:
            parts.add(name.removeprefix("attention."))
        else:
            names.append("lm_head" if name == "output" else name)
            _refuse_idle_filter(name, names[-1], linears, spec)
    if parts and parts != set(QKV):
        raise ConfigError(
            f"quantize.linear.float8.filter_fqns names {', '.join(sorted(parts))}; torchtitan 0.3 "
            "computes wq, wk and wv in one product: name all three, or none"
        )
    return [*names, "attention.qkv_linear"] if parts else names


def _refuse_idle_filter(written: str, name: str, linears: list[str], spec: Any) -> None:
    """A name that is in no other is misspelt: the module that is meant would be converted."""
    if any(name in fqn for fqn in linears):
        return
    kinds = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", fqn) for fqn in linears)
    raise ConfigError(
        f"quantize.linear.float8.filter_fqns holds {shown(written)}, which is in the name of no "
        f"linear module of {spec.name} {spec.flavor}; write a part of {', '.join(kinds)}, or leave "
        "it out"
    )


def set_num_layers(spec: Any, num_layers: int) -> None:
    """As many blocks as asked for, in place; those beyond the flavor's are like its last one."""
    layers = spec.model.layers
    if spec.name != "llama3" and num_layers > len(layers):
        raise too_many_blocks(num_layers, spec.name, spec.flavor, len(layers))
    from torch import nn
    from torchtitan.models.common.param_init import depth_scaled_std

    del layers[num_layers:]
    for layer_id in range(len(layers), num_layers):
        block = copy.deepcopy(layers[-1])
        # As torchtitan's own blocks: these start smaller the deeper they lie.
        std = depth_scaled_std(0.02, layer_id)
        init = {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}
        block.attention.wo.param_init = init
        block.feed_forward.w2.param_init = block.feed_forward.w3.param_init = init
        layers.append(block)


def use_attention_of_cpu(spec: Any) -> None:
    """Replaces attention whose kernels have no backward on CPU by plain products, in place."""
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    from mics_dtensor.train.dense_attention import DenseAttention

    for kind in (FlexAttention, VarlenAttention):
        for _, _, parent, attribute in list(spec.model.traverse(kind.Config)):
            setattr(parent, attribute, DenseAttention.Config())


def use_attention_of_traces(spec: Any) -> None:
    """Replaces FlexAttention by SDPA, in place: a trace then keeps what a GPU's kernel keeps.

    Not for training: it drops the mask of documents.
    """
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())

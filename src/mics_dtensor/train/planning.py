"""The planner's question from a run's configuration. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.plan.cluster import Cluster, gpu_named
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.operators import COMPILED, EAGER, Operators
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.presets import Preset, preset
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.report import notes_in_words, recommendation
from mics_dtensor.plan.search import answer
from mics_dtensor.plan.shape import Checkpointing, shape_of
from mics_dtensor.plan.tensor_parallel import uneven_heads, uneven_length
from mics_dtensor.topology import Topology
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import value_at
from mics_dtensor.train.loss_chunks import num_loss_chunks
from mics_dtensor.train.values import shown

ITEMSIZE = {"bfloat16": 2, "float32": 4}
DEGREES = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
)

PLANNED: Mapping[str, tuple[Any, ...]] = {
    "training.enable_cpu_offload": ("false", False),
    "model.converters": ("", ()),
    "optimizer.implementation": ("fused", "fused", "foreach", "for-loop"),
}

PLANNED_IN_TENSOR_PARALLEL: Mapping[str, tuple[Any, ...]] = {
    "parallelism.enable_sequence_parallel": ("true", True),
    "parallelism.enable_async_tensor_parallel": ("false", False),
    "model.tp_gemm_backend": ("default", "default"),
}
"""Keys whose other values would change memory or time: words for the command line, and values."""


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """What the planner may change in a run beside its partition size."""

    variants: bool = True
    """Micro-batch, checkpointing, hierarchy; else they are as the file says."""
    optimizer_over_replicas: bool = False


def question(
    config: RunConfig, cluster: Cluster, num_nodes: int, freedom: Freedom | None = None
) -> Question:
    """What `config` asks of the planner. Raises PlanError for what is not planned yet."""
    freedom = freedom or Freedom()
    _refuse_unplanned(config)
    if config.optimizer.name not in ("Adam", "AdamW"):
        raise PlanError(f"optimizer {config.optimizer.name} is not planned yet, only AdamW is")
    model = preset(config.model.name, config.model.flavor)
    if config.model.n_layers is not None:
        model = model.with_layers(config.model.n_layers)
    training, mics = config.training, config.mics
    degree = config.parallelism.tensor_parallel_degree
    _refuse_uneven(config, model)
    batch = training.global_batch_size
    if batch < 0:
        batch = training.local_batch_size * num_nodes * cluster.ranks_per_node // degree
    reduce = training.mixed_precision_reduce
    return Question(
        model=model,
        cluster=cluster,
        num_nodes=num_nodes,
        seq_len=training.seq_len,
        global_batch=batch,
        policy=Policy(
            gather_itemsize=ITEMSIZE[training.mixed_precision_param],
            reduce_itemsize=ITEMSIZE[reduce],
            hop_itemsize=ITEMSIZE[mics.second_hop_dtype or reduce],
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            chunked_loss=num_loss_chunks(config) > 1,
        ),
        overlap=PROFILES["none" if cluster.on_cpu else "fsdp2"].on(cluster),
        micro_batches=() if freedom.variants else (training.local_batch_size,),
        checkpointings=("none", "op", "full") if freedom.variants else (_checkpointing(config),),
        hierarchies=(True, False) if freedom.variants else (mics.hierarchical,),
        node_local_backwards=_node_local_backwards(config, freedom),
        optimizers_over_replicas=(
            (False, True) if freedom.optimizer_over_replicas else (mics.optimizer_over_replicas,)
        ),
        param_itemsize=ITEMSIZE[training.dtype],
        has_masters=mics.master_weights == "sharded",
        num_loss_chunks=num_loss_chunks(config),
        bucket_size_bytes=mics.bucket_size_bytes,
        tensor_parallel=degree,
        operators=operators_of(config),
        notes=_notes(config),
    )


def operators_of(config: RunConfig) -> Operators:
    """What the blocks and the loss run as: an operator at a time, or compiled."""
    compiled = config.compile.components if config.compile.enable else ()
    blocks, loss = (COMPILED if part in compiled else EAGER for part in ("model", "loss"))
    return replace(blocks, loss_bytes=loss.loss_bytes)


LATER = {
    "mics.overlap_boundary": "the column boundary is what it costs at most",
    "mics.overlap_update": "the column update is what it costs at most",
}
"""Keys that hide messages which the planner does not hide."""


def _notes(config: RunConfig) -> tuple[str, ...]:
    notes = [
        f"{name} = true is planned as if false: {most}"
        for name, most in LATER.items()
        if value_at(config, name)
    ]
    if config.compile.enable:
        notes.append("compile.enable = true is in the times; memory is that of eager operators")
    return tuple(notes)


def _refuse_uneven(config: RunConfig, model: Preset) -> None:
    """What tensor parallel cannot cut, in the words of the program (train/model_limits.py)."""
    degrees, length = config.parallelism, config.training.seq_len
    degree, cp = degrees.tensor_parallel_degree, degrees.context_parallel_degree
    if degree == 1:
        return
    shape = shape_of(model)
    if shape.tied:
        raise PlanError(
            f"{model.model} {model.flavor} has one table for embedding and head, which torchtitan "
            f"gathers and reduces twice under tensor_parallel_degree {degree}: not planned yet; "
            "give 1, or a model with two tables"
        )
    heads, key_value_heads = shape.num_heads, shape.num_key_value_heads
    uneven = uneven_heads(degree, num_heads=heads, num_key_value_heads=key_value_heads)
    if uneven is not None:
        raise PlanError(f"{model.model} {model.flavor}: {uneven}")
    why = f"tensor_parallel_degree {degree} and context_parallel_degree {cp}"
    if (uneven := uneven_length(length, degree, why)) is not None:
        raise PlanError(uneven)


def _node_local_backwards(config: RunConfig, freedom: Freedom) -> tuple[bool, ...]:
    """apply_mics refuses it for parameters that tensor parallel has cut."""
    if not freedom.variants:
        return (config.mics.node_local_backward,)
    return (False,) if config.parallelism.tensor_parallel_degree > 1 else (False, True)


def _refuse_unplanned(config: RunConfig) -> None:
    """What would be answered as if it were not written."""
    degrees = {name: value_at(config, name) for name in DEGREES}
    if found := [f"{name} = {degree}" for name, degree in degrees.items() if degree > 1]:
        raise PlanError(
            f"{', '.join(found)}: the planner knows data and tensor parallelism alone so far, and "
            "would answer for another run; write mics.partition_size yourself, the smallest that "
            "fits (docs/choose_partition_size.md)"
        )
    cut = config.parallelism.tensor_parallel_degree > 1
    if cut and config.mics.node_local_backward:
        raise PlanError(
            "mics.node_local_backward = true needs plain parameters, which tensor parallel has not "
            "(docs/parallelisms.md); delete the line"
        )
    refused = {**PLANNED, **PLANNED_IN_TENSOR_PARALLEL} if cut else PLANNED
    for name, (words, *planned) in refused.items():
        if (value := value_at(config, name)) not in planned:
            raise PlanError(
                f"{name} = {shown(value)} is not planned yet, and the answer would be that for a "
                f"run without it; if that is what you want to know, give --{name}={words}"
            )


def contradiction(ranks_per_node: int, option: int | None) -> str:
    """Of the file and of the command line, where both say how many ranks share a node."""
    return (
        f"mics.ranks_per_node = {ranks_per_node} contradicts --ranks-per-node {option}; give "
        f"--mics.ranks_per_node={option} too, or leave --ranks-per-node out"
    )


def shard_itemsize(config: RunConfig) -> int:
    """Bytes of an element of a shard: what an update of it sends."""
    if config.mics.master_weights == "sharded":
        return ITEMSIZE[config.training.mixed_precision_param]
    return ITEMSIZE[config.training.dtype]


def _checkpointing(config: RunConfig) -> Checkpointing:
    chosen = config.activation_checkpoint
    if chosen.mode == "selective" and chosen.selective_ac_option in ("op", "2"):
        return cast("Checkpointing", chosen.selective_ac_option)
    if chosen.mode in ("none", "full"):
        return cast("Checkpointing", chosen.mode)
    raise PlanError(
        f'activation_checkpoint.mode = "{chosen.mode}" with selective_ac_option = '
        f'"{chosen.selective_ac_option}" is not planned yet; there are none, full, and selective '
        'with "op" or "2"'
    )


def refuse_other_device(config: RunConfig, device: str) -> None:
    """Raise ConfigError where the cluster of the run was measured on other devices than `device`.

    A preset, or a file that a user wrote, is what the user says it is; its name is a label.
    """
    its = cluster(config.mics.cluster or "")
    if its.origin == "measured" and its.gpu not in (device, gpu_named(device)):
        raise ConfigError(
            f"[mics] cluster = {shown(config.mics.cluster)} was measured on {its.gpu}, and this "
            f"run is on {device}, which is another cluster: measure this one (mics measure), or "
            "write the partition_size"
        )


def recommended_partition_size(
    config: RunConfig, topology: Topology
) -> tuple[int, tuple[str, ...]]:
    """What the planner takes for a run that is otherwise as written, and its words.

    Pure: ranks that read the same files find the same. Raises PlanError.
    """
    its = cluster(config.mics.cluster or "")
    if its.ranks_per_node != topology.ranks_per_node:
        raise PlanError(
            f"the cluster {its.name} ({config.mics.cluster}) has {its.ranks_per_node} ranks on a "
            f"node, this run has {topology.ranks_per_node}; give the cluster that it runs on"
        )
    asked = question(config, its, topology.num_nodes, Freedom(variants=False))
    found = answer(asked)
    first, *rest = recommendation(found)
    words = (f"planned on {its.name}: {first}", *rest, *notes_in_words(asked))
    return found.best.variant.partition_size, words

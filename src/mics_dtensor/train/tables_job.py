"""The tables that say what is trained: job, model, data, batch, optimizer, degrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mics_dtensor.train.key import key


@dataclass(frozen=True, kw_only=True)
class Job:
    """[job]"""

    config_file: str | None = key(None, "this file; the same as --config-file")
    dump_folder: str = key("./outputs", "folder of everything that the run writes")
    description: str = key("default job", "a label")
    print_config: bool = key(False, "print torchtitan's configuration at start")
    save_config_file: str | None = key(None, "file in dump_folder for torchtitan's configuration")
    custom_config_module: str = key("", "torchtitan 0.2: module that extends its JobConfig")


@dataclass(frozen=True, kw_only=True)
class Model:
    """[model]"""

    name: str = key("llama3", "llama3, qwen3, deepseek_v3, gpt_oss, or your.module")
    flavor: str = key("debugmodel", "size of the model, as its registry names it")
    hf_assets_path: str = key(
        "./tests/assets/tokenizer",
        'folder of tokenizer and Hugging Face weights; "" trains a tokenizer on the run\'s text',
    )
    tokenizer_path: str | None = key(None, "older name of hf_assets_path")
    converters: tuple[str, ...] = key(
        (), "quantize.linear.float8, quantize.grouped_mm.float8, quantize.linear.mx, ..."
    )
    print_after_conversion: bool = key(False, "torchtitan 0.2: print the converted model")
    n_layers: int | None = key(
        None,
        "number of transformer blocks where it is not the flavor's; more than that: llama3",
        unit="blocks",
    )
    attn_backend: str | None = key(None, "flex, flex_flash or varlen; the model's own if not given")
    tp_gemm_backend: Literal["default", "dist_gemm"] = key(
        "default", "dist_gemm folds the collectives of tensor parallel into the products (llama3)"
    )
    num_mtp_layers: int = key(0, "multi-token prediction blocks (deepseek_v3)", unit="blocks")
    non_blocking_capacity_factor: float | None = key(
        None, "capacity of HybridEP's dispatch without synchronisation (deepseek_v3)"
    )


@dataclass(frozen=True, kw_only=True)
class DataLoader:
    """[training.dataloader] and [validation.dataloader]"""

    num_workers: int = key(0, "processes that load data", unit="processes")
    persistent_workers: bool = key(False, "keep them between epochs")
    pin_memory: bool = key(False, "copy batches to pinned memory")
    prefetch_factor: int | None = key(None, "batches that a worker loads ahead", unit="batches")


@dataclass(frozen=True, kw_only=True)
class Training:
    """[training]"""

    dataset: str = key("c4_test", "python_docs, or a data set that torchtitan knows")
    dataset_path: str | None = key(
        None, "where the data set lies, or a file ending in .jsonl, .txt or .parquet"
    )
    local_batch_size: int = key(8, "sequences of a rank in a micro-step", unit="sequences")
    global_batch_size: int = key(
        -1, "sequences of an optimizer step; -1 is one micro-step", unit="sequences"
    )
    seq_len: int = key(2048, "length of a sequence", unit="tokens")
    max_norm: float = key(1.0, "gradients are clipped to this norm")
    steps: int = key(10000, "optimizer steps to run", unit="steps")
    enable_cpu_offload: bool = key(False, "keep sharded model states in the memory of the host")
    dtype: Literal["bfloat16", "float32"] = key("float32", "dtype of parameters and states")
    mixed_precision_param: Literal["bfloat16", "float32"] = key(
        "bfloat16", "dtype in which parameters are gathered and used"
    )
    mixed_precision_reduce: Literal["float32"] = key("float32", "dtype of gradient messages")
    gc_freq: int = key(50, "Python's garbage is collected every so often", unit="steps")
    gc_debug: bool = key(False, "look for reference cycles that hold tensors")
    disable_cuda_graphs: bool = key(
        True, "no CUDA graphs; torchtitan 0.2 had none, torchtitan 0.3 has them on by default"
    )
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """[parallelism]"""

    data_parallel_replicate_degree: int = key(
        1, "replicas; -1 is filled by [mics] partition_size", unit="replicas"
    )
    data_parallel_shard_degree: int = key(
        -1, "ranks that share a replica's states, before context parallel; -1 is the rest"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "whether gathered parameters are freed between forward and backward"
    )
    enable_fsdp_symm_mem: bool = key(False, "symmetric memory for FSDP (H100 or newer)")
    tensor_parallel_degree: int = key(1, "tensor parallel; 1 is off", unit="ranks")
    enable_sequence_parallel: bool = key(True, "with tensor parallel, norms on slices of sequence")
    disable_loss_parallel: bool = key(False, "torchtitan 0.2: gather logits before the loss")
    enable_async_tensor_parallel: bool = key(
        False, "pipeline tensor parallel's collectives with products; needs compile"
    )
    spmd_backend: Literal["partial_dtensor", "full_dtensor", "spmd_types"] | None = key(
        None, "how torchtitan lays out tensors; not given: spmd_types from torch 2.14 on"
    )
    pipeline_parallel_degree: int = key(1, "pipeline stages in ranks; 1 is off", unit="ranks")
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = key(
        None, "names of the modules of each stage"
    )
    pipeline_parallel_first_stage_less_layers: int = key(1, "blocks that it has less")
    pipeline_parallel_last_stage_less_layers: int = key(1, "blocks that it has less")
    pipeline_parallel_layers_per_stage: int | None = key(None, "blocks of a stage", unit="blocks")
    pipeline_parallel_schedule: str = key("1F1B", "a schedule of torch.distributed.pipelining")
    pipeline_parallel_schedule_csv: str | None = key("", "file of a schedule")
    pipeline_parallel_microbatch_size: int = key(
        1, "sequences of a pipeline's micro-batch", unit="sequences"
    )
    pipeline_parallel_expert_parallel_overlap: bool = key(
        True, "torchtitan 0.2: overlap experts' messages under DualPipeV"
    )
    context_parallel_degree: int = key(1, "ranks that share a sequence; 1 is off", unit="ranks")
    context_parallel_load_balancer: str | None = key("headtail", "headtail, ptrr, or none")
    context_parallel_ptrr_mask_key: str | None = key(None, "the mask that ptrr balances")
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = key(
        "allgather", "torchtitan 0.2: how keys and values go round"
    )
    expert_parallel_degree: int = key(1, "ranks that share the experts; 1 is off", unit="ranks")
    expert_tensor_parallel_degree: int = key(1, "torchtitan 0.2: tensor parallel inside experts")
    expert_parallel_comm_backend: Literal["standard", "deepep", "hybridep", "minimal_async_ep"] = (
        key("standard", "how tokens reach their experts")
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """[optimizer]"""

    name: str = key("AdamW", "Adam or AdamW")
    lr: float = key(8e-4, "learning rate")
    beta1: float = key(0.9, "decay of the first moment")
    beta2: float = key(0.95, "decay of the second moment")
    eps: float = key(1e-8, "added to the denominator")
    weight_decay: float = key(0.1, "weight decay")
    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = key(
        "fused", "how the step is computed"
    )
    early_step_in_backward: bool = key(False, "torchtitan 0.2: the optimizer inside the backward")
    param_groups: tuple[dict[str, Any], ...] = key(
        (),
        "tables with `pattern` and what differs for the parameters whose name it finds: see below",
    )


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """[lr_scheduler]"""

    warmup_steps: int = key(200, "steps of linear warm-up", unit="steps")
    total_steps: int | None = key(
        None,
        "length of the schedule, at least that of the training; not given, training.steps",
        unit="steps",
    )
    decay_ratio: float | None = key(None, "share of the steps that decay; all after the warm-up")
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: float = key(0.0, "lowest learning rate over the highest")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """[loss]"""

    num_chunks: int | None = key(
        None,
        "slices of the sequence whose logits are made one after the other; not given: 8 where that "
        "divides a rank's part of the sequence, else 1",
        unit="slices",
    )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """[validation]"""

    enable: bool = key(False, "validate during training")
    dataset: str = key(
        "c4_validation",
        "as training.dataset; not given where that is python_docs: python_docs_validation, the "
        "part of that text that is held out",
    )
    dataset_path: str | None = key(None, "as training.dataset_path")
    local_batch_size: int = key(8, "sequences of a rank at a time", unit="sequences")
    seq_len: int = key(2048, "length of a sequence", unit="tokens")
    freq: int = key(10, "validate every so often", unit="steps")
    steps: int = key(-1, "batches a time; -1 is the whole set", unit="batches")
    dataloader: DataLoader = field(default_factory=DataLoader)

"""The tables around the training: profiling, metrics, checkpoints, compile, messages, quantize."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mics_dtensor.train.key import key


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """[profiling]"""

    enable_profiling: bool = key(False, "write traces of torch.profiler")
    save_traces_folder: str = key("profile_traces", "folder of the traces, in dump_folder")
    profile_freq: int = key(10, "length of a profiling cycle", unit="steps")
    profiler_active: int = key(1, "steps of a cycle that are traced", unit="steps")
    profiler_warmup: int = key(3, "steps of a cycle before them", unit="steps")
    profiler_repeat: int | None = key(None, "number of cycles", unit="cycles")
    profiler_skip_first: int | None = key(None, "steps before the first cycle", unit="steps")
    profiler_skip_first_wait: int | None = key(None, "whether the first cycle waits")
    enable_memory_snapshot: bool = key(False, "write snapshots of the device's memory")
    save_memory_snapshot_folder: str = key("memory_snapshot", "their folder, in dump_folder")
    memory_snapshot_freq: int | None = key(None, "not given: profile_freq", unit="steps")
    memory_snapshot_max_entries: int = key(1_000_000, "events that a snapshot holds")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """[metrics]"""

    log_freq: int = key(10, "a line every so often, and at step 1", unit="steps")
    enable_tensorboard: bool = key(False, "write for TensorBoard")
    disable_color_printing: bool = key(False, "no colours")
    save_tb_folder: str = key("tb", "TensorBoard's folder, in dump_folder")
    save_for_all_ranks: bool = key(False, "every rank writes, not only one")
    enable_wandb: bool = key(False, "send to Weights & Biases")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """[checkpoint]"""

    enable: bool = key(False, "save and resume")
    enable_ft_dataloader_checkpoints: bool = key(True, "torchtitan 0.2: for fault_tolerance")
    folder: str = key("checkpoint", "folder of the checkpoints, in dump_folder")
    interval: int = key(500, "save every so often", unit="steps")
    initial_load_path: str | None = key(None, "checkpoint to start from where folder is empty")
    initial_load_model_only: bool = key(True, "of it, only the weights")
    initial_load_in_hf: bool = key(False, "it is Hugging Face's safetensors")
    initial_load_in_hf_quantized: bool = key(False, "it is quantized")
    last_save_model_only: bool = key(True, "the last checkpoint holds only weights")
    last_save_in_hf: bool = key(False, "the last checkpoint is Hugging Face's safetensors")
    export_dtype: Literal["float16", "bfloat16", "float32"] = key(
        "float32", "dtype of a last checkpoint of weights only"
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "save while the training goes on"
    )
    keep_latest_k: int = key(10, "checkpoints that are kept; 0 is all", unit="checkpoints")
    load_step: int = key(-1, "step to resume from; -1 is the latest", unit="steps")
    exclude_from_loading: tuple[str, ...] = key(
        (),
        "what a run begins anew when it goes on: optimizer, lr_scheduler, dataloader, train_state "
        "(the step and the tokens seen)",
    )
    enable_first_step_checkpoint: bool = key(False, "save after the first step too")
    create_seed_checkpoint: bool = key(False, "save the freshly made model and stop (1 rank)")
    load_only: bool = key(False, "never save")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """[activation_checkpoint]"""

    mode: Literal["selective", "full", "memory_budget", "none"] = key(
        "selective", "which activations are computed again in the backward"
    )
    selective_ac_option: str = key("2", '"op": by operator; "2": every second block')
    per_op_sac_force_recompute_mm_shapes_by_fqns: tuple[str, ...] = key(
        ("moe.router.gate",), "products of the shapes of these are always computed again"
    )
    early_stop: bool = key(False, "torchtitan 0.2: stop recomputing once all is there")
    memory_budget: float = key(0.5, "0 is full, 1 is none; needs compile")
    visualize_memory_budget_pareto: bool = key(False, "draw the choice")
    preserve_rng_state: bool = key(True, "the same random numbers the second time")
    determinism_check: str = key("default", "as torch.utils.checkpoint has it")
    debug: bool = key(False, "collect what helps debugging")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """[compile]"""

    enable: bool = key(False, "torch.compile")
    components: tuple[str, ...] = key(("model", "loss"), "what is compiled")
    backend: str = key("inductor", "compiler")


@dataclass(frozen=True, kw_only=True)
class Comm:
    """[comm]"""

    init_timeout_seconds: int = key(300, "of messages until the first step is done", unit="s")
    train_timeout_seconds: int = key(100, "of messages afterwards", unit="s")
    trace_buf_size: int = key(20000, "entries of the flight recorder; 0 is off")
    save_traces_folder: str = key("comm_traces", "its folder, in dump_folder")
    save_traces_file_prefix: str = key("rank_", "how its files begin")
    mode: Literal["default", "fake_backend", "local_tensor", "torchcomms"] = key(
        "default", "who carries messages"
    )


@dataclass(frozen=True, kw_only=True)
class Debug:
    """[debug]"""

    seed: int | None = key(None, "of all random numbers")
    deterministic: bool = key(False, "deterministic algorithms")
    deterministic_warn_only: bool = key(False, "warn where there is none")
    moe_force_load_balance: bool = key(False, "every expert gets as many tokens")
    detect_anomaly: bool = key(False, "find where a NaN comes from; slow")
    spmd_typechecking: bool = key(False, "check layouts under spmd_types")
    enable_structured_logging: bool = key(False, "torchtitan's trace log of every rank")


@dataclass(frozen=True, kw_only=True)
class Override:
    """[override]"""

    imports: tuple[str, ...] = key((), "torchtitan 0.3's overrides, as module.function")


@dataclass(frozen=True, kw_only=True)
class Float8Linear:
    """[quantize.linear.float8]"""

    enable_fsdp_float8_all_gather: bool = key(False, "torchtitan 0.2: gather parameters as float8")
    precompute_float8_dynamic_scale_for_fsdp: bool = key(False, "torchtitan 0.2: scales at once")
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(
        None, "how values are scaled; not given was tensorwise in torchtitan 0.2"
    )
    filter_fqns: tuple[str, ...] = key((), "modules that stay as they are")
    emulate: bool = key(False, "compute without the hardware; for tests")


@dataclass(frozen=True, kw_only=True)
class MXLinear:
    """[quantize.linear.mx]"""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = key(
        "triton", "torchtitan 0.2: kernel of a cast"
    )
    recipe_name: str = key("mxfp8_cublas", "torchtitan 0.2: how values are scaled")
    filter_fqns: tuple[str, ...] = key(("output",), "modules that stay as they are")


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """[quantize.linear]"""

    float8: Float8Linear = field(default_factory=Float8Linear)
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass(frozen=True, kw_only=True)
class Float8GroupedMM:
    """[quantize.grouped_mm.float8]"""

    fqns: tuple[str, ...] = key((), "modules whose experts are quantized")


@dataclass(frozen=True, kw_only=True)
class MXGroupedMM:
    """[quantize.grouped_mm.mx]"""

    recipe_name: Literal["mxfp8", "mxfp8_rceil"] = key("mxfp8", "how values are scaled")
    fqns: tuple[str, ...] = key((), "modules whose experts are quantized")


@dataclass(frozen=True, kw_only=True)
class QuantizedGroupedMM:
    """[quantize.grouped_mm]"""

    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """[quantize]"""

    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimation:
    """[memory_estimation]"""

    enable: bool = key(False, "torchtitan 0.2: estimate memory")
    disable_fake_mode: bool = key(False, "torchtitan 0.2: with real tensors")


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """[fault_tolerance]"""

    enable: bool = key(False, "torchtitan 0.2: torchft")
    process_group: str = key("gloo", "torchtitan 0.2: its messages")
    process_group_timeout_ms: int = key(10000, "torchtitan 0.2: their timeout", unit="ms")
    replica_id: int = key(0, "torchtitan 0.2: which replica")
    group_size: int = key(0, "torchtitan 0.2: how many")
    min_replica_size: int = key(1, "torchtitan 0.2: fewest in a step")
    semi_sync_method: str | None = key(None, "torchtitan 0.2: local_sgd or diloco")


@dataclass(frozen=True, kw_only=True)
class Experimental:
    """[experimental]"""

    custom_import: str = key("", "torchtitan 0.2: module to import")
    custom_args_module: str = key("", "torchtitan 0.2: older name of job.custom_config_module")

"""What DeepSpeed's keys ask for, in the keys of a run: one function for what they speak of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.deepspeed_batch import batch
from mics_dtensor.train.deepspeed_optimizer import optimizer, schedule
from mics_dtensor.train.deepspeed_sought import Sought
from mics_dtensor.train.values import shown

ZERO = "zero_optimization"


def clipping(its: Sought) -> None:
    """DeepSpeed does not clip unless it is told; torchtitan always does."""
    norm = its.number("gradient_clipping", 0)
    value = float(norm) if norm > 0 else math.inf
    its.set("training.max_norm", value, unless_auto="gradient_clipping")


def precision(its: Sought) -> None:
    """Masters in fp32, parameters used in bf16; fp16 becomes bf16."""
    bf16 = its.get("bf16.enabled", its.get("bfloat16.enabled", False))
    fp16, autocast = its.get("fp16.enabled", False), its.get("torch_autocast.enabled", False)
    if bf16 and fp16:
        raise ConfigError("bf16.enabled and fp16.enabled are both true; DeepSpeed refuses it too")
    narrow = bool(bf16 or fp16 or autocast)
    if narrow or not its.auto & {"bf16.enabled", "fp16.enabled", "bfloat16.enabled"}:
        its.values["training.mixed_precision_param"] = "bfloat16" if narrow else "float32"
    if fp16:
        its.differs["fp16.enabled"] = (
            "parameters are used in bf16, which needs no loss scale; there is no fp16"
        )
    if autocast:
        its.differs["torch_autocast.enabled"] = (
            "FSDP2 casts whole units to bf16, not operator by operator"
        )
        if its.get("torch_autocast.dtype") in ("fp16", "float16", "half", "torch.float16"):
            its.differs["torch_autocast.dtype"] = "there is no fp16; parameters are used in bf16"
    masters = its.get("bf16.bf16_master_weights_and_grads", False)
    if masters:
        its.values["training.dtype"] = "bfloat16"
    if (
        "bf16.bf16_optimizer_states" in its.given
        and its.get("bf16.bf16_optimizer_states") != masters
    ):
        its.differs["bf16.bf16_optimizer_states"] = (
            "moments have the dtype of the parameters (training.dtype); with fp32 ones "
            'optimizer.implementation = "fused_opt_states_bf16" makes them bf16'
        )


def partition(its: Sought) -> None:
    """The stages of ZeRO and the groups of MiCS as a partition size."""
    stage = its.number(f"{ZERO}.stage", 0)
    shards = its.number(f"{ZERO}.mics_shard_size", -1)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{ZERO}.stage = {shown(stage)}; DeepSpeed has 0, 1, 2 and 3")
    if stage < 3:  # those that share a sequence share its parameters too
        shared = its.values.get("parallelism.context_parallel_degree", 1)
        its.values["mics.partition_size"] = shared
    if stage in (1, 2):
        its.values["mics.optimizer_over_replicas"] = True
    if stage == 2:
        its.differs[f"{ZERO}.stage"] = (
            "optimizer states are sharded over the replicas, gradients are whole on each; "
            'mics.partition_size = "node" shards both, and the parameters, inside a node'
        )
    if shards > 0 and stage == 3:
        its.values["mics.partition_size"] = int(shards)
    elif shards > 0:
        its.differs[f"{ZERO}.mics_shard_size"] = (
            f"MiCS belongs to stage 3, and the stage is {stage}"
        )
    if f"{ZERO}.mics_hierarchical_params_gather" in its.given:
        hierarchical = bool(its.get(f"{ZERO}.mics_hierarchical_params_gather"))
        its.values["mics.hierarchical"] = hierarchical
    if (secondary := its.number(f"{ZERO}.zero_hpz_partition_size", 1)) > 1:
        its.values["mics.node_local_backward"] = True
        its.values["mics.ranks_per_node"] = int(secondary)


def offload(its: Sought) -> None:
    """In torchtitan parameters, gradients and states go to the host's memory together."""
    devices = {
        key: its.get(f"{ZERO}.{key}.device", "none")
        for key in ("offload_optimizer", "offload_param")
    }
    for key, device in devices.items():
        if device == "nvme":
            its.differs[f"{ZERO}.{key}.device"] = (
                "nothing is swapped to NVMe; training.enable_cpu_offload = true uses host memory, "
                "a larger partition_size less of it"
            )
    old = [
        k
        for k in ("cpu_offload", "cpu_offload_param", "cpu_offload_params")
        if its.get(f"{ZERO}.{k}")
    ]
    if "cpu" not in devices.values() and not old:
        return
    its.values["training.enable_cpu_offload"] = True
    if devices["offload_param"] != "cpu":
        key = f"{ZERO}.offload_optimizer.device" if not old else f"{ZERO}.{old[0]}"
        its.differs[key] = "FSDP2 offloads parameters, gradients and states together"


def tensor_parallel(its: Sought) -> None:
    """Ranks that split every layer."""
    name, older = "tensor_parallel.autotp_size", "tensor_parallel.tp_size"
    name = name if name in its.given else older
    if (size := its.number(name, 1)) > 1:
        its.values["parallelism.tensor_parallel_degree"] = int(size)
        # Its runtime/config.py divides by a world that only an mpu or a mesh makes smaller.
        its.differs[name] = (
            "where the script gives no mpu, DeepSpeed counts every rank in train_batch_size, "
            "those too that share layers and so read the same samples; training.global_batch_size "
            "counts a sample once: check it"
        )


def checkpointing(its: Sought) -> None:
    """DeepSpeed's keys tune a checkpointing that the model's code calls: so it was on."""
    block = "activation_checkpointing."
    its.values["activation_checkpoint.mode"] = "full"
    reasons = {
        "partition_activations": "activations that are kept stay on their rank; tensor parallel "
        "with enable_sequence_parallel splits them",
        "cpu_checkpointing": "activations that are kept stay on the GPU",
        "number_checkpoints": 'every block is checkpointed; selective_ac_option = "2" every second',
        "contiguous_memory_optimization": "memory is the caching allocator's",
        "synchronize_checkpoint_boundary": "blocks are not synchronised",
        "profile": "profiling.enable_profiling = true traces them too",
    }
    for name, reason in reasons.items():
        if its.get(block + name):
            its.differs[block + name] = reason


def compilation(its: Sought) -> None:
    """DeepCompile's passes are its own; the blocks are compiled."""
    if its.get("compile.deepcompile"):
        its.values["compile.enable"] = True
        its.differs["compile.deepcompile"] = "torch.compile of every block, without its own passes"


def saving(its: Sought) -> None:
    """Every checkpoint of DeepSpeed can be resumed from; torchtitan's last one holds weights."""
    its.values["checkpoint.last_save_model_only"] = False


def printing(its: Sought) -> None:
    """How often a line, and the configuration at start."""
    if (every := its.number("steps_per_print")) is not None and 1 <= every < math.inf:
        its.values["metrics.log_freq"] = int(every)
    if its.get("dump_state"):
        its.values["job.print_config"] = True


def monitors(its: Sought) -> None:
    """TensorBoard and Weights & Biases."""
    if its.get("wandb.enabled"):
        its.values["metrics.enable_wandb"] = True
    if its.get("tensorboard.enabled"):
        its.values["metrics.enable_tensorboard"] = True
    if path := its.get("tensorboard.output_path"):
        its.values["metrics.save_tb_folder"] = str(path)
        its.differs["tensorboard.output_path"] = "metrics.save_tb_folder lies in job.dump_folder"
    if name := its.get("tensorboard.job_name"):
        its.values["job.description"] = str(name)


MAPPINGS: Mapping[str, Callable[[Sought], None]] = {
    each.__name__: each
    for each in (
        batch,
        clipping,
        precision,
        optimizer,
        schedule,
        partition,
        offload,
        tensor_parallel,
        checkpointing,
        compilation,
        saving,
        printing,
        monitors,
    )
}
ALWAYS = ("batch", "clipping", "precision", "optimizer", "schedule", "partition", "saving")
"""What a file says even where it says nothing: DeepSpeed's defaults are not ours."""

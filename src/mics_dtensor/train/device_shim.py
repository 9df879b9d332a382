"""torchtitan 0.3.0 on a machine without an accelerator: every difference in one place.

Each patch names what torchtitan does and why it does not run. On a CUDA machine only the two that
are wrong there too are made: process-group timeouts, and the peak of devices it does not know.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from mics_dtensor.upstream import set_timeout

DeviceType = Literal["cpu", "cuda"]

logger = logging.getLogger(__name__)


def use_device(device_type: DeviceType) -> None:
    """Make torchtitan run on `device_type`. Call before its trainer is built; twice is as once."""
    from torchtitan.tools import utils

    if device_type == "cpu" and not isinstance(utils.device_module, SimpleNamespace):
        # Without an accelerator torchtitan falls back to "cuda". Its modules import the two names
        # by value, so those that were imported before this call are told as well.
        device_module = _cpu_device_module()
        for module in _torchtitan_modules():
            if hasattr(module, "device_type"):
                module.device_type = "cpu"  # type: ignore[attr-defined]
            if hasattr(module, "device_module"):
                module.device_module = device_module  # type: ignore[attr-defined]
        _patch_offload()
        _quiet_dtensor()
    _patch_peak_flops(device_type)
    _patch_pg_timeouts()
    # torchdata's own call of something that torch deprecated, on every rank.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def use_attention_of_cpu(model_config: Any) -> bool:
    """Replace FlexAttention, which has no backward on CPU, in a torchtitan model config.

    Returns whether something was replaced. Scaled dot product attention cannot mask documents: a
    token sees those before it in its sequence, also of the document before.
    """
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    found = list(model_config.traverse(FlexAttention.Config))
    for _, _, parent, name in found:
        if isinstance(name, int):
            parent[name] = ScaledDotProductAttention.Config()
        else:
            setattr(parent, name, ScaledDotProductAttention.Config())
    if found:
        logger.warning(
            "on CPU attention is scaled dot product attention instead of FlexAttention: documents "
            "that share a sequence are not masked from each other"
        )
    return bool(found)


def use_sums_of_gloo(model_parts: Iterable[torch.nn.Module]) -> None:
    """Reduce gradients by plain sums where gloo carries them.

    torchtitan sets a divide factor of 1.0 on every FSDP unit, for which torch asks PREMUL_SUM;
    gloo has none. The switch does not recurse, so every unit is told.
    """
    if dist.get_backend() != "gloo":
        return
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def save_now(checkpointer: Any, step: int) -> None:
    """Save all of the run after `step`, whatever the interval, and wait for it. Collective.

    torchtitan's own manager saves at its interval, or "the last step", which may be weights alone.
    """
    if hasattr(checkpointer, "save_now"):
        checkpointer.save_now(step)
        return
    checkpointer.maybe_wait_for_saving()
    if not checkpointer._should_save(step):  # else it has just done so
        from torchtitan.components.checkpoint import AsyncMode

        checkpointer.dcp_save(
            checkpointer._flattened_model_states_sd(),
            checkpoint_id=checkpointer._create_checkpoint_id(step),
            async_mode=AsyncMode.DISABLED,
            enable_garbage_collection=True,
        )


def _quiet_dtensor() -> None:
    """Say once what torch warns about on every rank, and what comes of it."""
    warnings.filterwarnings("ignore", message="DTensor (manual_seed|random operators)")
    logger.warning(
        "on CPU every shard of a parameter starts from the same random numbers (DTensor has no "
        "offsets for this device): a first loss depends on the partition size"
    )


def _torchtitan_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.split(".")[0] == "torchtitan"]


def _cpu_device_module() -> SimpleNamespace:
    """torch.cpu, and what torchtitan asks of torch.cuda beyond it."""
    public = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"}
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(name="cpu", total_memory=total_bytes)

    def answer(value: object) -> Callable[..., object]:
        return lambda *_, **__: value

    return SimpleNamespace(
        **public
        | {
            # LOCAL_RANK picks a device where there are several; here all ranks share the one.
            "device_count": answer(1),
            # torchtitan's DeviceMemoryMonitor; the caching allocator it asks for does not exist.
            "get_device_name": answer("cpu"),
            "get_device_properties": answer(properties),
            "memory_stats": lambda *_: _memory_of_process(),
            "reset_peak_memory_stats": answer(None),
            "empty_cache": answer(None),
        }
    )


def _memory_of_process() -> dict[str, int]:
    """The most memory this process ever held, under the names of torch.cuda.memory_stats."""
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}


def _patch_offload() -> None:
    """CPU offload without pinned memory, which torch has for accelerators alone."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torchtitan.distributed import fsdp

    fsdp.CPUOffloadPolicy = partial(CPUOffloadPolicy, pin_memory=False)


def _patch_peak_flops(device_type: DeviceType) -> None:
    """A device whose peak is not known gets NaN: torchtitan takes an A100's, so a wrong MFU."""
    from torchtitan.tools import utils

    if getattr(utils.get_peak_flops, "__module__", "") == __name__:
        return
    of_torchtitan = utils.get_peak_flops
    a100_flops = 312e12

    def get_peak_flops(device_name: str) -> float:
        """FLOP/s of `device_name` in bf16, NaN where not known."""
        if device_type == "cpu":
            return math.nan
        peak = float(of_torchtitan(device_name))
        if peak == a100_flops and "A100" not in device_name:
            return math.nan
        return peak

    utils.get_peak_flops = get_peak_flops


def _patch_pg_timeouts() -> None:
    """The timeouts of process groups, which torchtitan lowers after the first step.

    It calls torch.distributed.set_timeout, which torch has from 2.14 on, and passes device_ids to
    the barrier, which gloo refuses.
    """
    from torchtitan.distributed import utils as dist_utils

    def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
        """Collective: no rank waits for less before every rank has arrived."""
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()
        else:
            dist.barrier()
        meshes = parallel_dims.get_all_one_dimensional_meshes().values()
        for group in [*(mesh.get_group() for mesh in meshes), None]:
            set_timeout(timeout, group)

    dist_utils.set_pg_timeouts = set_pg_timeouts

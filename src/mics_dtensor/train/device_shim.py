"""torchtitan 0.3.0 on a machine without an accelerator: every difference in one place.

Each patch names what torchtitan does and why it does not run. On a CUDA machine only those that
are wrong there too are made: process-group timeouts and pipelines on torch 2.13, the peak of
devices it does not know, and weights of experts that have replicas.
"""

from __future__ import annotations

import inspect
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement, Shard

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
        _make_masks_plainly()
    _patch_peak_flops(device_type)
    _patch_pg_timeouts()
    _patch_pipelines()
    _patch_names_of_experts()
    _quiet_others()


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


def _quiet_others() -> None:
    """What torchtitan and its libraries call although torch wants another name; on every rank."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata
    # spmd_types 0.2.3, under torch 2.14
    old = "all_gather_into_tensor|reduce_scatter_tensor"
    warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.({old})` is deprecated")
    # torch 2.14 of torchtitan's embedding, on whose output nothing works in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    # The gate of experts is asked for in fp32; on CPU it stays in the dtype of its weight.
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")


def _quiet_dtensor() -> None:
    """Say once what torch warns about on every rank, and what comes of it."""
    warnings.filterwarnings("ignore", message="DTensor (manual_seed|random operators)")
    logger.warning(
        "on CPU every shard of a parameter starts from the same random numbers (DTensor has no "
        "offsets for this device): a first loss depends on the partition size"
    )


def _make_masks_plainly() -> None:
    """Masks without a compiler: torchtitan and torch compile the making of one for each shape.

    Here that would take a C++ compiler, and seconds of every rank.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = create_block_mask
    _attention._compiled_create_block_mask = create_block_mask  # type: ignore[assignment]


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


def _patch_names_of_experts() -> None:
    """Weights of experts under Hugging Face's names, where there are replicas.

    Which experts a rank holds torchtitan reads from the dim of every placement; Replicate has none.
    """
    from torchtitan.models.utils import MoEStateDictAdapter

    of_torchtitan = MoEStateDictAdapter._caculate_indices_from_placements
    if of_torchtitan.__module__ == __name__:
        return
    of_no_dim = Shard(-1)

    def indices(
        adapter: Any,
        dim: int,
        dim_size: int,
        dtensor_placements: tuple[Placement, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[int, int]:
        """The first expert of this rank, and the one after its last."""
        cut = tuple(of_no_dim if its.is_replicate() else its for its in dtensor_placements)
        held: tuple[int, int] = of_torchtitan(adapter, dim, dim_size, cut, device_mesh)
        return held

    MoEStateDictAdapter._caculate_indices_from_placements = indices


def _patch_pipelines() -> None:
    """Pipelines on torch 2.13.

    torchtitan hands a schedule its micro-batches one by one, as torch takes them from 2.14 on;
    before, `step` knows only a whole batch, which it cuts itself.
    """
    from torch.distributed.pipelining import schedules

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        parameters = inspect.signature(kind.step).parameters
        if "arg_mbs" not in parameters:
            kind.step = _step_of_micro_batches(kind.step)  # type: ignore[method-assign]


def _step_of_micro_batches(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of a schedule that also takes arg_mbs, kwarg_mbs and target_mbs, as torch 2.14's."""

    def step(
        schedule: Any,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **options: Any,
    ) -> Any:
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return of_torch(schedule, *args, **options)
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        for stage in stages:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        losses, loss_kwargs = options.get("losses"), options.get("loss_kwargs")
        schedule._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs
        )
        return None

    return step


def stages_of_pipeline(degrees: Any, parallelism: Any, model: Any) -> tuple[int, list[list[str]]]:
    """How many stages torchtitan makes of `model`, and the modules of each. Raises ValueError."""
    from torchtitan.distributed import pipeline_parallel

    number, *rest = pipeline_parallel._get_pipeline_metadata(degrees, parallelism, model)
    named = parallelism.module_fqns_per_model_part
    generated = pipeline_parallel._generate_llm_fqn_per_model_part
    return number, named if named is not None else generated(number, *rest)

"""On a machine without a GPU. Forked, so that the rest of the tests see torchtitan as it is."""

import math
import sys
from datetime import timedelta

import pytest
from harness.ranks import ranks

pytest.importorskip("torchtitan")

from mics_dtensor.train import device_shim


@ranks(1)
def test_every_module_of_torchtitan_is_told_the_device() -> None:
    device_shim.use_device("cpu")
    told = [m for name, m in sys.modules.items() if name.startswith("torchtitan")]
    types = {m.device_type for m in told if hasattr(m, "device_type")}
    modules = {id(m.device_module) for m in told if hasattr(m, "device_module")}
    assert types == {"cpu"}
    assert len(modules) == 1


@ranks(1)
def test_twice_is_as_once() -> None:
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils

    device_shim.use_device("cpu")
    before = utils.device_module, utils.get_peak_flops
    device_shim.use_device("cpu")
    assert (utils.device_module, utils.get_peak_flops) == before
    assert dist_utils.set_pg_timeouts.__module__ == device_shim.__name__


@ranks(1)
def test_the_peak_of_a_device_that_is_not_known_is_not_that_of_an_a100() -> None:
    from torchtitan.tools import utils

    device_shim.use_device("cuda")
    assert math.isnan(utils.get_peak_flops("NVIDIA Z9"))
    assert utils.get_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12


@ranks(1)
def test_memory_is_that_of_the_process() -> None:
    from torchtitan.components.metrics import build_device_memory_monitor

    device_shim.use_device("cpu")
    stats = build_device_memory_monitor().get_peak_stats()
    assert 0.05 < stats.max_reserved_gib < 64
    assert 0 < stats.max_reserved_pct < 100


@ranks(2)
def test_the_timeouts_of_a_gloo_world_are_set() -> None:
    import torch.distributed as dist
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    from mics_dtensor.upstream import timeout_of

    device_shim.use_device("cpu")
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=2,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=2,
        spmd_backend="partial_dtensor",
    )
    dist_utils.set_pg_timeouts(timeout=timedelta(seconds=17), parallel_dims=dims)
    for group in (None, dims.get_mesh("fsdp").get_group()):
        assert timeout_of(group, "cpu") == timedelta(seconds=17)
    dist.barrier()

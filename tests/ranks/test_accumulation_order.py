"""The order of messages depends on nothing that differs between ranks: hashing, timing, use."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import Sharding, Toy, assert_replicas_equal, mesh_of, shard_toy
from harness.ranks import ranks

from mics_dtensor.accumulate import gradient_accumulation

UNITS = {f"u{n}": {"a": (5, 3), "b": (n + 1,), "c": (8, 2)} for n in range(4)}


def train(model: Toy, steps: int, *, overlap: bool, size: int, sleep_s: float) -> None:
    """Each replica uses what it draws; the ranks of a partition group draw the same units."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    of_replica, of_rank = random.Random(rank // 2), random.Random(rank)
    for step in range(steps):
        num_micro_steps = 1 + step % 3
        with gradient_accumulation(
            model,
            num_micro_steps=num_micro_steps,
            overlap_boundary=overlap,
            bucket_size_bytes=size,
        ) as accumulation:
            for k in range(num_micro_steps):
                with accumulation.micro_step():
                    use = {
                        f"{unit}.{name}": of_rank.uniform(-1, 1)
                        for unit, its in UNITS.items()
                        for name in its
                        if of_replica.random() < 0.6
                    }
                    for _ in range(1 + (k + step) % 2):
                        if use:
                            model(use).square().backward()
                    if sleep_s:
                        time.sleep(of_rank.uniform(0, sleep_s))
        optimizer.step()
        optimizer.zero_grad()


@ranks(4, timeout_s=120)
def test_replicas_are_equal_after_fifty_steps_whatever_leaves_first() -> None:
    """Bit for bit, with and without overlap, in small buckets and large, with random sleeps."""
    mesh, ends = mesh_of(2, 2), []
    for overlap, size in ((False, 1), (True, 1), (True, 100), (False, 2**20)):
        model = Toy(UNITS)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        shard_toy(model, Sharding(), mesh)
        train(model, 50, overlap=overlap, size=size, sleep_s=0.002)
        assert_replicas_equal(list(model.parameters()), mesh)
        ends.append([p.full_tensor().detach() for p in model.parameters()])  # type: ignore[union-attr]
    for other in ends[1:]:
        for mine, right in zip(other, ends[0], strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


@pytest.mark.timeout(180)
def test_ranks_that_hash_differently_train_alike(tmp_path: Path) -> None:
    """Four interpreters, each with a PYTHONHASHSEED of its own, over one file store."""
    ranks_run = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=os.environ
            | {
                "PYTHONHASHSEED": str(1000 + rank),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=150) for process in ranks_run]
    finally:
        for process in ranks_run:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in ranks_run), said
    hashes = [out.split()[0] for out, _ in said]
    assert len(set(hashes)) == 4
    assert [out.split()[1] for out, _ in said] == ["equal"] * 4


HERE = Path(__file__).resolve()
PROGRAM = f"""
import sys
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], world_size=4,
                        rank=int(sys.argv[1]), timeout=timedelta(seconds=60))
spec = spec_from_file_location("order", {str(HERE)!r})
order = module_from_spec(spec)
spec.loader.exec_module(order)
mesh = order.mesh_of(2, 2)
for overlap in (False, True):
    model = order.Toy(order.UNITS)
    order.shard_toy(model, order.Sharding(), mesh)
    order.train(model, 10, overlap=overlap, size=1, sleep_s=0.0)
    order.assert_replicas_equal(list(model.parameters()), mesh)
print(hash("a name"), "equal")
dist.barrier()
dist.destroy_process_group()
"""

"""What optimizer states over the replicas save: the peak of real CPU ranks, beside the prediction.

    python -m benchmarks.sharded_memory --json results.json

Plain MiCS and `ReplicaShardedOptimizer` in both modes train the same stack of square layers under
AdamW, each in processes of its own, over gloo. The peak is the kernel's (VmHWM). glibc's limits for
mmap and trim are pinned: by default it keeps what is freed, and hides the difference. A unit is a
message of its own at the boundary (bucket_size_bytes), so that buffers are small beside states.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.arguments import count, result_file
from benchmarks.results import commit, write
from mics_dtensor import Layout, Topology, gradient_accumulation, init_mesh
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of

MODES = ("plain", "fp32", "sharded")
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STEPS = 2
TIMEOUT_S = 900


def parser() -> argparse.ArgumentParser:
    """The command line; a rank has --mode and --folder too."""
    its = argparse.ArgumentParser(prog="python -m benchmarks.sharded_memory")
    its.add_argument("--ranks", type=count, default=8)
    its.add_argument("--replicas", type=count, default=4)
    its.add_argument("--dim", type=count, default=2048)
    its.add_argument("--layers", type=count, default=25)
    its.add_argument("--json", type=result_file, help="where to write the results")
    its.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    its.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    its.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return its


def main() -> None:
    given = parser().parse_args()
    if given.rank is not None:
        train(given)
        return
    results = run(given)
    print(table(results))
    if given.json is not None:
        write(results, given.json)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """By mode, bytes of a rank: its states, and its peak; means over the ranks."""
    num_parameters = given.layers * given.dim**2
    shard, replicas = num_parameters * given.replicas // given.ranks, given.replicas
    bytes_per_element = {  # shard, gradient, AdamW's two moments, master
        "plain": 4 + 4 + 8.0,
        "fp32": 4 + 4 + 8 / replicas,
        "sharded": 2 + 4 + 12 / replicas,
    }
    seen = {mode: _of_mode(mode, given) for mode in MODES}
    modes = {}
    for mode, its in seen.items():
        saved = (bytes_per_element["plain"] - bytes_per_element[mode]) * shard
        fell = seen["plain"]["peak_bytes"] - its["peak_bytes"]
        modes[mode] = {**its, "fell_bytes": fell, "predicted_bytes": saved}
    return {
        "schema": 1,
        "host": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "configuration": {
            **{name: getattr(given, name) for name in ("ranks", "replicas", "dim", "layers")},
            **PINNED,
        },
        "num_parameters": num_parameters,
        "modes": modes,
    }


def table(results: dict[str, Any]) -> str:
    """The modes for a terminal, in MB of a rank."""
    lines = [f"{'':<10}{'states':>10}{'peak':>10}{'fell':>10}{'predicted':>11}{'ratio':>8}"]
    for mode, its in results["modes"].items():
        cells = (its["state_bytes"], its["peak_bytes"], its["fell_bytes"])
        told = "".join(f"{cell / 1e6:>10.1f}" for cell in cells)
        predicted = its["predicted_bytes"]
        ratio = f"{its['fell_bytes'] / predicted:>8.3f}" if predicted else ""
        lines.append(f"{mode:<10}{told}{predicted / 1e6:>11.1f}{ratio}")
    return "\n".join(lines)


def _of_mode(mode: str, given: argparse.Namespace) -> dict[str, float]:
    environment = {**os.environ, **PINNED, "OMP_NUM_THREADS": "1"}
    shape = [f"--{name}={getattr(given, name)}" for name in ("ranks", "replicas", "dim", "layers")]
    with tempfile.TemporaryDirectory() as folder:
        its = [sys.executable, "-m", "benchmarks.sharded_memory", *shape, f"--mode={mode}"]
        started = [
            subprocess.Popen([*its, f"--folder={folder}", f"--rank={rank}"], env=environment)
            for rank in range(given.ranks)
        ]
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            sys.exit(f"error: the ranks of {mode} ended with {codes}")
        told = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    means = {name: sum(each[name] for each in told) / len(told) for name in told[0]}
    print(f"{mode}: peak {means['peak_bytes'] / 1e6:.1f} MB a rank", file=sys.stderr, flush=True)
    return means


def train(given: argparse.Namespace) -> None:
    """What a rank does: some steps, and then says what it has held."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.folder}/rendezvous",
        rank=given.rank,
        world_size=given.ranks,
    )
    partition_size = given.ranks // given.replicas
    topology = Topology.uniform(world_size=given.ranks, ranks_per_node=partition_size)
    mesh = init_mesh(Layout(topology=topology, partition_size=partition_size), device_type="cpu")
    model, optimizer = _built(given, mesh)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1 + given.rank + given.ranks * step)
        batch = torch.randn(4, given.dim, generator=random)
        accumulation = gradient_accumulation(model, num_micro_steps=1, bucket_size_bytes=1)
        with accumulation as its, its.micro_step():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    told = {"peak_bytes": _peak_bytes(), "state_bytes": _state_bytes(optimizer)}
    (given.folder / f"rank{given.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _built(given: argparse.Namespace, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each layer is sharded as soon as it is made: whole, they would be the peak."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = []
    for _ in range(given.layers):
        layer = nn.Linear(given.dim, given.dim, bias=False)
        layers.append(fully_shard(layer, mesh=mesh, mp_policy=policy))
    model = fully_shard(nn.Sequential(*layers), mesh=mesh, mp_policy=policy)
    if given.mode == "plain":
        return model, torch.optim.AdamW(model.parameters(), foreach=False)
    return model, ReplicaShardedOptimizer(
        model, torch.optim.AdamW, master_weights=given.mode, foreach=False
    )


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of AdamW's moments on this rank."""
    held = 0
    for states in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            its = getattr(states[name], "flat", None)
            held += (local_of(states[name]) if its is None else its).nbytes
    return held


def _peak_bytes() -> int:
    lines: Sequence[str] = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kib) * 1024


if __name__ == "__main__":
    main()

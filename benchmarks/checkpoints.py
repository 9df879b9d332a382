"""Saving and loading beside torch.save and safetensors: the same bytes, one disk, one run.

`python -m benchmarks.checkpoints --folder DIR --ranks 2 --mebibytes 512 --json FILE`. Each system
in turn, several times over; what is compared are ratios within a repetition. All write with fsync,
and read files that have just been dropped from the page cache (posix_fadvise).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.arguments import count, result_file
from benchmarks.results import commit, processor
from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: every system in turn, `options.repeat` times; rank 0 writes the answer."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        world_size=options.ranks,
        rank=rank,
        timeout=timedelta(seconds=600),
    )
    width = options.width
    num_layers = max(1, options.mebibytes * 2**20 // (3 * 4 * width * width))
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    mesh = init_device_mesh("cpu", (1, options.ranks), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    run = Run(Path(folder), model, optimizer)
    found: dict[str, list[float]] = {}
    for repetition in range(options.repeat + 1):
        for name, seconds in run.all_systems(repetition):
            if repetition:  # the first one warms up
                found.setdefault(name, []).append(seconds)
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps({"seconds": found, **run.sizes}))
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """One model, one folder, and every way to write and read it."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder
        self.model, self.optimizer = model, optimizer
        self.sizes: dict[str, int] = {}
        self.checkpoints = {
            mode: Checkpoints(
                folder / mode,
                model=model,
                optimizer=optimizer,
                options=CheckpointOptions(asynchronous=mode == "asynchronous"),
            )
            for mode in ("synchronous", "asynchronous")
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """The shards of this rank: weights and two moments."""
        found = {}
        for name, parameter in self.model.named_parameters():
            states = self.optimizer.state[parameter]
            for key, value in (("w", parameter), *states.items()):
                if value.dim():
                    found[f"{name}.{key}"] = value.detach().to_local().contiguous()  # type: ignore[attr-defined]
        return found

    def all_systems(self, repetition: int) -> list[tuple[str, float]]:
        """Seconds of each, by all ranks together."""
        tensors, rank = self.tensors(), dist.get_rank()
        self.sizes["bytes"] = sum(t.nbytes for t in tensors.values()) * dist.get_world_size()
        found = []
        plain: list[tuple[str, Callable[[Path], object], Callable[[Path], object]]] = [
            ("torch.save", lambda p: torch.save(tensors, p), torch.load)
        ]
        try:
            from safetensors.torch import load_file, save_file
        except ModuleNotFoundError:
            pass
        else:
            plain.append(("safetensors", lambda p: save_file(tensors, p), load_file))
        for name, write, read in plain:
            path = self.folder / f"{name}.{rank}"

            def saved(write: Callable[[Path], object] = write, path: Path = path) -> None:
                write(path)
                synced(path)

            def loaded(read: Callable[[Path], Any] = read, path: Path = path) -> None:
                for key, value in read(path).items():
                    tensors[key].copy_(value)

            found.append((f"{name} write", timed(saved)))
            dropped(path)
            found.append((f"{name} read", timed(loaded)))
            path.unlink()
        for mode, its in self.checkpoints.items():
            folder = its.folder
            found.append((f"{mode} save", timed(lambda its=its: its.save(repetition))))
            if mode == "asynchronous":
                found.append(("asynchronous wait", timed(its.wait)))
            for path in sorted((folder / f"step-{repetition}").iterdir()):
                dropped(path)
            if mode == "synchronous":
                found.append(("load", timed(lambda its=its: its.load(repetition))))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
        return found


def timed(action: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start_s = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start_s


def synced(path: Path) -> None:
    """On the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def dropped(path: Path) -> None:
    """Out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the repetitions of what one is to the other within each."""

    def ratio(ours: str, theirs: str) -> float:
        pairs = zip(seconds[ours], seconds[theirs], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    plain = [name.removesuffix(" write") for name in seconds if name.endswith(" write")]
    found = {f"save / {name}": ratio("synchronous save", f"{name} write") for name in plain}
    found |= {f"load / {name}": ratio("load", f"{name} read") for name in plain}
    found["stall of an asynchronous save / synchronous save"] = ratio(
        "asynchronous save", "synchronous save"
    )
    return found


def main() -> None:
    """As the docstring of the file says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="on the disk that is meant")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--mebibytes", type=count, default=512, help="of weights and moments")
    parser.add_argument("--width", type=count, default=1024, help="of the square layers")
    parser.add_argument("--repeat", type=count, default=5)
    parser.add_argument("--json", type=result_file, help="where to write the results")
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        context = get_context("fork")
        ranks = [
            context.Process(target=rank_main, args=(rank, options, folder))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        answer = json.loads((Path(folder) / "answer.json").read_text())
    told = {
        "schema": 1,
        "host": f"{processor()}, {platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "load_average": load_average,
        "commit": commit(),
        "versions": {"torch": metadata.version("torch")},
        "date": date.today().isoformat(),
        "configuration": {
            "ranks": options.ranks,
            "width": options.width,
            "repeat": options.repeat,
        },
        **answer,
        "ratios": ratios(answer["seconds"]),
    }
    for name, value in told["ratios"].items():
        print(f"{name:<50} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""`mics measure`: what a cluster can do, measured on its ranks, as a file for `mics plan`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mics_dtensor.cli.target import why_not_writable
from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.plan.calibrate import Measured, added_to_a_unit, cluster_toml, columns, warnings
from mics_dtensor.plan.cluster import gpu_named, presets
from mics_dtensor.plan.nccl_tests import cluster_of_reports
from mics_dtensor.plan.presets import Preset, preset
from mics_dtensor.train.load import load

if TYPE_CHECKING:
    from mics_dtensor.measure.device import Shape
    from mics_dtensor.measure.survey import Found

SUMMARY = (
    "  measure        what a cluster can do, under torchrun; writes cluster.toml for `mics plan`"
)

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LAUNCH = "torchrun --nproc-per-node 8 -m mics_dtensor.cli measure"


def parser() -> argparse.ArgumentParser:
    """The arguments of `mics measure`."""
    its = argparse.ArgumentParser(
        prog="mics measure",
        description=f"{SUMMARY.split(maxsplit=1)[1]}. Started on every node: {LAUNCH}",
        allow_abbrev=False,
    )
    its.add_argument("--out", type=Path, default=Path("cluster.toml"), help="where it is written")
    its.add_argument(
        "--config-file", type=Path, help="a run, whose products are timed (default: llama3 8B)"
    )
    its.add_argument("--min-size", default="64K", help="of a message (default: 64K)")
    its.add_argument("--max-size", default="1G", help="of a message (default: 1G)")
    its.add_argument(
        "--partition-sizes", metavar="8,16,...", help="whose groups are timed (default: all)"
    )
    its.add_argument(
        "--repetitions", type=int, default=10, help="of each size; their median counts"
    )
    its.add_argument("--tokens", type=int, help="rows of the products (default: of a micro-step)")
    its.add_argument("--ranks-per-node", type=int, help="ranks that share a fast domain")
    its.add_argument("--name", help="of the cluster, in the file")
    its.add_argument(
        "--from-nccl-tests",
        type=Path,
        nargs="+",
        metavar="FILE.json",
        help="print the link constants of nccl-tests' own reports instead; needs no ranks",
    )
    return its


def run(argv: Sequence[str]) -> str:
    """What is printed, on rank 0; on the others nothing. Raises MicsError."""
    options = parser().parse_args(list(argv))
    if options.from_nccl_tests:
        return _of_reports(options.from_nccl_tests)
    smallest, largest = bytes_of(options.min_size), bytes_of(options.max_size)
    if not 64 <= smallest <= largest:
        raise PlanError(
            f"--min-size {options.min_size} and --max-size {options.max_size}: give at least 64 "
            "bytes, and no more for the first than for the second"
        )
    if options.repetitions < 1:
        raise PlanError(f"--repetitions {options.repetitions}; give 1 or more")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise PlanError(f"measuring needs ranks: start it with torchrun, e.g. {LAUNCH}")
    return _measured(options, smallest, largest)


def bytes_of(said: str) -> int:
    """Bytes of "64K", "1GiB" or "65536". Raises PlanError."""
    found = re.fullmatch(r"(\d+) ?([KMG]?)(i?B)?", said.strip(), flags=re.IGNORECASE)
    if not found:
        raise PlanError(f"{said!r} is no size; write 65536, 64K, 16MiB or 1G")
    return int(found[1]) * UNITS[found[2].upper()]


def _of_reports(paths: Sequence[Path]) -> str:
    its = cluster_of_reports(paths)
    names = ",".join(str(path) for path in paths)
    constants = [f"  {name}: {value} ({origin})" for name, value, origin, _ in its.constants()]
    return "\n".join(
        [*columns(its.timings), "", *constants, "", f"mics plan --cluster {names} ..."]
    )


def _measured(options: argparse.Namespace, smallest: int, largest: int) -> str:
    import torch
    import torch.distributed as dist

    from mics_dtensor.measure.collectives import sizes_between
    from mics_dtensor.measure.survey import Survey, name_of_this, survey
    from mics_dtensor.topology import Topology

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        if dist.get_world_size() < 2:
            raise ConfigError("one rank has nobody to send to; start two or more")
        _refuse_unwritable(options.out)
        topology = Topology.detect(ranks_per_node=options.ranks_per_node)
        known = gpu_named(torch.cuda.get_device_name(device)) if device is not None else None
        wanted = Survey(
            name=options.name or name_of_this(topology),
            sizes=sizes_between(smallest, largest),
            shapes=shapes_of(options, on_gpu=on_gpu),
            peak_flops_per_s=presets()["gpu"][known]["peak_tflops"] * 1e12 if known else None,
            partition_sizes=_sizes(options.partition_sizes),
            repetitions=options.repetitions,
        )
        found = survey(wanted, topology, device or torch.device("cpu"), _say)
        if dist.get_rank() != 0:
            return ""
        return written(options.out, found)
    finally:
        dist.destroy_process_group()


def _refuse_unwritable(out: Path) -> None:
    """Collective: rank 0, which writes, looks, and all raise PlanError by its word."""
    import torch.distributed as dist

    why = [why_not_writable(out) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(why)
    if why[0] is not None:
        raise PlanError(f"--out: {why[0]}")


def written(out: Path, found: Found) -> str:
    """Writes the file; what is printed. Raises PlanError where it cannot, all of it printed."""
    text, lines = cluster_toml(found.measured), columns(found.measured.timings)
    if found.hierarchical:
        lines += ["", "# ours: in two stages, between nodes and inside them"]
        lines += columns(found.hierarchical)
    lines += ["", *told(found.measured), ""]
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        print("\n".join([*lines, text]), flush=True)
        raise PlanError(
            f"--out {out} could not be written ({error.strerror}); its text is the end of the "
            "output: put that into a file by hand"
        ) from None
    return "\n".join([*lines, f"written: {out}"])


def told(measured: Measured) -> list[str]:
    """The constants beside the tables, and what to beware of."""
    host_s, per_byte_s = added_to_a_unit(measured.units)
    memory_gb, reserved_gb = measured.memory_bytes / 1e9, measured.reserved_bytes / 1e9
    return [
        "products:",
        *(
            f"  {each.name}: [{each.rows}, {each.inner}] x [{each.inner}, {each.columns}]: "
            f"{each.flops_per_s / 1e12:.4g} TFLOP/s"
            for each in measured.products
        ),
        f"  all of them {measured.product_share:.3f} of the peak of "
        f"{measured.peak_flops_per_s / 1e12:.4g} TFLOP/s; they lose "
        f"{measured.overlap_slowdown:.2f} s for each second of messages beside them",
        f"FSDP2 adds {host_s * 1e6:.0f} us to a unit and micro-step, and "
        f"{per_byte_s * 1e12:.0f} us for each MB of its messages",
        f"memory: {memory_gb:.1f} GB at {measured.memory_bytes_per_s / 1e9:.4g} GB/s, of which "
        f"{reserved_gb:.2f} GB are held beside tensors",
        *(f"warning: {words}" for words in warnings(measured)),
    ]


def shapes_of(options: argparse.Namespace, *, on_gpu: bool) -> list[Shape]:
    """The products of a block and of the head, and a large square one for the peak."""
    from mics_dtensor.measure.device import Shape

    model: Preset = preset("llama3", "8B" if on_gpu else "debugmodel")
    tokens = 4096 if on_gpu else 256
    if options.config_file is not None:
        config = load(["--config-file", str(options.config_file)]).config
        model = preset(config.model.name, config.model.flavor)
        tokens = config.training.local_batch_size * config.training.seq_len
    tokens = options.tokens or tokens
    shapes: dict[str, Shape] = {}
    for unit in model.units:
        for name, shape in unit.parameters:
            if len(shape) == 2 and "embeddings" not in name:
                short = name.removesuffix(".weight").rpartition(".")[2]
                shapes.setdefault(short, Shape(short, tokens, shape[1], shape[0]))
    if not shapes:
        raise PlanError(f"{model.model} {model.flavor} has no matrix products that are known")
    side = 8192 if on_gpu else 512
    return [*shapes.values(), Shape("square", side, side, side)]


def _sizes(said: str | None) -> list[int] | None:
    if said is None:
        return None
    try:
        return [int(part) for part in said.split(",")]
    except ValueError:
        raise PlanError(f"--partition-sizes {said}; write numbers, as 8,16,64") from None


def _say(words: str) -> None:
    if os.environ.get("RANK") == "0":
        print(f"mics measure: {words}", file=sys.stderr, flush=True)

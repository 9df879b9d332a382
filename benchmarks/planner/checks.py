"""What the planner was to reach: value, bound, whether it holds, and why where it does not."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.planner import deepspeed
from benchmarks.planner.counted import byte_cases
from benchmarks.planner.published import Case
from benchmarks.planner.step_times import FILE
from benchmarks.planner.tables import decay_cases
from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout, partition_sizes
from mics_dtensor.plan.cluster import presets
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.memory import Holding, peak_memory
from mics_dtensor.plan.overlap import PROFILES
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.question import Question
from mics_dtensor.plan.search import answer
from mics_dtensor.plan.shape import ModelShape, preset_of
from mics_dtensor.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something to reach. `value` is None where nothing here measures it."""

    name: str
    value: float | None
    bound: str
    holds: bool | None
    reason: str = ""
    """Why it does not hold, or what measures it."""


def at_most(name: str, value: float, bound: float, reason: str = "") -> Check:
    return Check(
        name=name,
        value=value,
        bound=f"<= {bound:g}",
        holds=value <= bound,
        reason="" if value <= bound else reason,
    )


def of_cases(name: str, cases: list[Case], reason: str = "") -> Iterator[Check]:
    errors = [abs(case.error) for case in cases]
    yield at_most(f"{name}: mean error of {len(cases)}", statistics.mean(errors), 0.12, reason)
    yield at_most(f"{name}: largest error", max(errors), 0.25, reason)


ZERO3_REASON = (
    "the constants of deepspeed-0.5 are fitted on 8 and 64 GPUs (--fit); what 512 add beyond is in "
    "no source that was read"
)
MPT_70B_REASON = (
    "mpt-70b-a100-40gb-64 runs 27 % slower than the same model on 128 GPUs (276 to 376 tokens/s) "
    "and 26 % slower than on 32 of 80 GB at the same micro-batch: the allocator at the edge of 40 "
    "GB (S6) or a slow node, neither of which is modelled; our memory is the same on 64 as on 128"
)


def smallest_group() -> int:
    """The smallest partition size with which the 100B model fits p4de."""
    setting = deepspeed.mics_100b(512, partition_size=8, overlap="fsdp2", hierarchical=True)
    topology = Topology.uniform(world_size=512, ranks_per_node=8)
    for size in partition_sizes(topology):
        layout = Layout(topology=topology, partition_size=size)
        units = traffic_units(preset_of(setting.shape, name="100B"), layout, setting.policy)
        if peak_memory(units, setting.work, Holding()).total <= setting.cluster.memory_bytes:
            return size
    raise PlanError("the 100B model fits in no partition of 512 GPUs of p4de")


def scaling_checks() -> Iterator[Check]:
    """128 to 512 GPUs: MiCS and ZeRO-3, against the paper's headline."""
    size = smallest_group()
    mics = [
        deepspeed.tflops(
            deepspeed.mics_100b(gpus, partition_size=size, overlap="fsdp2", hierarchical=True)
        )
        for gpus in (128, 512)
    ]
    zero = [
        deepspeed.tflops(
            deepspeed.mics_100b(
                gpus, partition_size=gpus, overlap=deepspeed.ZERO3_05, hierarchical=False
            )
        )
        for gpus in (128, 512)
    ]
    for name, pair, published_share, within in (
        (f"MiCS 100B (partition size {size})", mics, 0.994, 0.01),
        ("ZeRO-3 100B", zero, 0.72, 0.08),
    ):
        share = pair[1] / pair[0]
        holds = abs(share - published_share) <= within
        yield Check(
            name=f"{name}: scaling from 128 to 512 GPUs",
            value=share,
            bound=f"{published_share} +- {within}",
            holds=holds,
            reason="" if holds else ZERO3_REASON,
        )
    holds = abs(zero[1] / 62 - 1) <= 0.2
    yield Check(
        name="ZeRO-3 100B: TFLOP/s of a GPU on 512",
        value=zero[1],
        bound="62 +- 20 %",
        holds=holds,
        reason="" if holds else ZERO3_REASON,
    )
    yield Check(
        name="ZeRO-3 100B on 512 GPUs is slower than MiCS",
        value=zero[1] / mics[1],
        bound="< 1",
        holds=zero[1] < mics[1],
    )


def decay_checks() -> Iterator[Check]:
    """An all-reduce of 256 MiB on 32 and 64 nodes (S29); 4 to 16 were fitted."""
    yield at_most(
        f"busbw by nodes: largest error of {len(decay_cases())}",
        max(abs(case.error) for case in decay_cases()),
        0.25,
    )


def question(shape: ModelShape, name: str, num_nodes: int) -> Question:
    its = cluster(name)
    return Question(
        model=preset_of(shape, name="dense"),
        cluster=its,
        num_nodes=num_nodes,
        seq_len=2048,
        global_batch=4 * num_nodes * its.ranks_per_node,
        policy=Policy(),
        overlap=PROFILES["fsdp2"],
    )


GPT_175B = ModelShape(
    num_layers=96,
    hidden=12288,
    attention_width=12288,
    key_value_width=12288,
    ffn=49152,
    vocab=50257,
    gated=False,
)


def own_checks() -> Iterator[Check]:
    start = time.process_time()  # of this process: other work on the machine does not count
    num_rows = len(answer(question(GPT_175B, "p4de", 2048)).rows)
    seconds = time.process_time() - start
    yield at_most(f"175B on 16,384 GPUs, {num_rows} rows: CPU seconds", seconds, 1.0)
    asked = wrong = 0
    for name in presets()["cluster"]:
        for num_nodes in (1, 4, 16, 64):
            for flavor in ("8B", "70B", "405B"):
                model = preset("llama3", flavor)
                its = cluster(name)
                batch = 2 * num_nodes * its.ranks_per_node
                ask = Question(
                    model=model,
                    cluster=its,
                    num_nodes=num_nodes,
                    seq_len=4096,
                    global_batch=batch,
                    policy=Policy(),
                    overlap=PROFILES["fsdp2"],
                )
                try:
                    best = answer(ask).best
                except PlanError:
                    continue
                asked += 1
                wrong += best.memory.total > its.memory_bytes
    yield at_most(f"recommendations of {asked} that do not fit", float(wrong), 0.0)


HOST_REASON = (
    "every step takes longer than its sleeps and messages: with 8 ranks on 2 cores each waits for "
    "the slowest host, which no table of messages holds; most with small units over all nodes"
)


def counted_checks() -> Iterator[Check]:
    """Bytes and step times of the emulated cluster, from the files of its runs."""
    cases = byte_cases()
    yield at_most(
        f"bytes out of a node, counted on the emulated cluster: largest error of {len(cases)}",
        max(abs(case.error) for case in cases),
        0.01,
    )
    name = "step time with constants of `mics measure`: mean error"
    best = "cases in which the chosen partition takes at most 1.03 of the least measured"
    if not FILE.exists():
        how = "python -m benchmarks.planner.step_times, as root on a quiet machine"
        yield Check(name=name, value=None, bound="<= 0.1", holds=None, reason=how)
        yield Check(name=best, value=None, bound=">= 0.9", holds=None, reason=how)
        return
    told = json.loads(FILE.read_text(encoding="utf-8"))
    yield at_most(f"{name} of {told['num_errors']}", told["mean_error"], 0.10, HOST_REASON)
    share = told["share_chosen_well"]
    yield Check(name=best, value=share, bound=">= 0.9", holds=share >= 0.9)


TRACED = FILE.with_name("planner_175b.json")


def traced_checks() -> Iterator[Check]:
    """175B by trace, from the file of its last run."""
    name = "175B by trace of two depths, every partition size to 16,384 GPUs"
    how = "python -m benchmarks.planner.traced --write"
    told = json.loads(TRACED.read_text(encoding="utf-8")) if TRACED.exists() else {}
    for key, unit, bound in (("cpu_s", "CPU seconds", 15.0), ("megabytes", "MB", 600.0)):
        if key in told:
            yield at_most(f"{name}: {unit} ({told['date'][:10]})", told[key], bound)
        else:
            yield Check(
                name=f"{name}: {unit}", value=None, bound=f"<= {bound:g}", holds=None, reason=how
            )


MEMORY = "pytest -m 'matrix or not matrix' -s tests/train/test_plan_memory.py"
ELSEWHERE = (
    ("closed form of memory against the trace", "<= 0.03", MEMORY),
    ("trace of two depths, extrapolated, against the full depth", "<= 0.001", MEMORY),
)


def all_checks(groups: dict[str, list[Case]]) -> list[Check]:
    """Every check, those of the published runs first."""
    checks = [
        check
        for name, cases in groups.items()
        for check in of_cases(name, cases, MPT_70B_REASON if "foundry" in name else "")
    ]
    checks += [*scaling_checks(), *decay_checks(), *own_checks(), *counted_checks()]
    checks += traced_checks()
    checks += [Check(name=n, value=None, bound=b, holds=None, reason=r) for n, b, r in ELSEWHERE]
    return checks

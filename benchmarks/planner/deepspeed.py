"""DeepSpeed's ZeRO-3 and MiCS on p4d and p4de: what 0.5 adds to a message, and the 100B runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.published import DATA, Case, Setting, tokens_per_s
from mics_dtensor.layout import GroupShape
from mics_dtensor.plan.cluster_file import cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.operators import Operators
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.overlap import HOST_0_5, PROFILES, Host, Overlap, message_s
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.shape import ModelShape
from mics_dtensor.plan.timing import two_parameters
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.plan.unit import Unit

BF16 = Policy(reduce_itemsize=2, hop_itemsize=2, chunked_loss=False)
OF_2021 = Operators(rotation_bytes=0, score_bytes=21, attention="as products")
"""Learned positions, and attention before flash-attn: scores written (2), scaled (4), masked (4),
in the softmax (4), in the dropout (5), read (2)."""

ZERO3_05 = "deepspeed-0.5"

GPT_100B = ModelShape(
    num_layers=80,
    hidden=10240,
    attention_width=10240,
    key_value_width=10240,
    ffn=40960,
    vocab=50257,
    gated=False,
)


def mics_100b(gpus: int, *, partition_size: int, overlap: str, hierarchical: bool) -> Setting:
    """100B on p4de (S1, S2). Shape and micro-batch are chosen here; the paper's are not known."""
    its = cluster("p4de")
    return Setting(
        shape=GPT_100B,
        cluster=its,
        gpus=gpus,
        partition_size=partition_size,
        work=Work(
            shape=GPT_100B,
            seq_len=2048,
            micro_batch=8,
            checkpointing="full",
            operators=OF_2021,
        ),
        micro_steps=1,
        overlap=PROFILES[overlap].on(its),
        policy=BF16,
        hierarchical=hierarchical,
    )


def tflops(setting: Setting) -> float:
    """Model TFLOP/s of a GPU."""
    return tokens_per_s(setting) * setting.shape.model_flops(setting.work.seq_len) / 1e12


def row(name: str) -> dict[str, Any]:
    """A row of [[deepspeed]]."""
    (found,) = (each for each in DATA["deepspeed"] if each["id"] == name)
    return found


def roberta(read: dict[str, Any], profile: str) -> Setting:
    """RoBERTa of Hugging Face on p4d (S36), ZeRO-3 over all ranks."""
    hidden, its = read["hidden"], cluster("p4d")
    shape = ModelShape(
        num_layers=read["layers"],
        hidden=hidden,
        attention_width=hidden,
        key_value_width=hidden,
        ffn=4 * hidden,
        vocab=read["vocab"],
        gated=False,
        tied=True,
    )
    return Setting(
        shape=shape,
        cluster=its,
        gpus=read["gpus"],
        partition_size=read["gpus"],
        work=Work(
            shape=shape,
            seq_len=read["seq"],
            micro_batch=read["micro_batch"],
            checkpointing="full",
            operators=OF_2021,
        ),
        micro_steps=1,
        overlap=PROFILES[profile].on(its),
        policy=BF16,
        fused_qkv=False,
    )


@dataclass(frozen=True)
class Needed:
    """Seconds that 0.5 adds to a message, beside the wire and the copies, on so many ranks."""

    ranks: int
    seconds: float


def of_one_node() -> Needed:
    """From the forward of BERT-5B on 8 GPUs: what ZeRO-2's does not take, over its gathers."""
    read = row("ds-0.5-bert-5b-8")
    hidden, its = read["hidden"], cluster("p4d")
    block = Unit(
        name="layers.*",
        shapes=((hidden, hidden),) * 4 + ((4 * hidden, hidden), (hidden, 4 * hidden)),
        shard=GroupShape(1, 8, 1),
        replicate=GroupShape(1, 1, 8),
        count=read["layers"],
        gathers=1,
        gather_itemsize=2,
    )
    gathers = [s for s in step_traffic([block], Options()).stages if s.name == "gather"]
    bare = _profile(replace(HOST_0_5, message_s=0.0, rank_s=0.0))
    wire_s = sum(message_s(stage, block, its, bare) for stage in gathers)
    waited_s = (read["forward_ms"] - read["forward_ms_zero2"]) / 1e3
    return Needed(8, (waited_s - wire_s) / (len(block.shapes) * block.count))


def of_many_nodes() -> Needed:
    """From RoBERTa-52B on 64 GPUs: what makes our step as long as theirs."""
    read = row("ds-0.5-roberta-52b-64")
    low, high = 0.0, 1.0
    for _ in range(50):
        seconds = (low + high) / 2
        host = replace(HOST_0_5, message_s=seconds, rank_s=0.0)
        setting = replace(roberta(read, ZERO3_05), overlap=_profile(host))
        if tflops(setting) > read["tflops_per_gpu"]:
            low = seconds
        else:
            high = seconds
    return Needed(read["gpus"], low)


def fitted_host() -> Host:
    """0.5's two constants, from what one node and what eight need (as C6: none is below 0)."""
    needs = [of_one_node(), of_many_nodes()]
    us, vs = [1 / n.seconds for n in needs], [n.ranks / n.seconds for n in needs]
    constant, per_rank = two_parameters(us, vs, [1.0, 1.0])
    if constant <= 0 or per_rank <= 0:
        constant, per_rank = 0.0, sum(vs) / sum(v * v for v in vs)
    return replace(HOST_0_5, message_s=constant, rank_s=per_rank)


def _profile(host: Host) -> Overlap:
    return replace(PROFILES[ZERO3_05], host=host)


def later_cases() -> list[Case]:
    """DeepSpeed 0.6 on 64 and 256 GPUs, in model TFLOP/s of a GPU: nothing is fitted to them."""
    cases = []
    for read in DATA["deepspeed"]:
        if read["id"].startswith("ds-0.6"):
            predicted = tflops(roberta(read, "deepspeed"))
            cases.append(
                Case(name=read["id"], published=read["tflops_per_gpu"], predicted=predicted)
            )
    return cases

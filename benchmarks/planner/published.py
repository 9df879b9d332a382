"""Published runs as questions to the cost model; shapes and rows: benchmarks/published."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mics_dtensor.layout import Layout
from mics_dtensor.plan.cluster import Cluster, preset_cluster
from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.operators import EAGER, Operators
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.overlap import PROFILES, Overlap
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import Checkpointing, ModelShape, preset_of
from mics_dtensor.plan.step import StepTime, step_time
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.topology import Topology

DATA = tomllib.loads((Path(__file__).parents[1] / "published" / "runs.toml").read_text("utf-8"))
GPUS = {
    "A100-SXM-40GB": "A100-40GB",
    "A100-SXM-80GB": "A100-80GB",
    "A800-80GB": "A800-80GB",
    "H100-SXM-80GB": "H100-80GB",
    "H100-96GB-HBM2e-500W": "H100-96GB",
    "H200-SXM": "H200",
}


EAGER_2024 = replace(EAGER, norm_bytes=36)
"""torch of 2024, a norm by its operators: cast (6), square (8), mean (4), scale (8), cast (6),
weight (4)."""

INTERNLM = Operators(norm_bytes=20, rotation_bytes=4, attention="flash-1")
"""Its code of 2023: input cast to fp32 (6), apex's norm in fp32 (8), cast back (6); the rotation
and attention of flash-attn 1. AMSP is by the same laboratory, and is taken to be like it."""

BF16 = Policy(reduce_itemsize=2, hop_itemsize=2, chunked_loss=False)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run of a model, as the cost model sees it."""

    shape: ModelShape
    cluster: Cluster
    gpus: int
    partition_size: int
    work: Work
    micro_steps: int
    overlap: Overlap
    policy: Policy
    hierarchical: bool = False
    fused_qkv: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published number beside ours, in tokens/s of a GPU."""

    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Ours over theirs, less one."""
        return self.predicted / self.published - 1


def seconds(setting: Setting) -> StepTime:
    """The step of a setting."""
    topology = Topology.uniform(
        world_size=setting.gpus, ranks_per_node=setting.cluster.ranks_per_node
    )
    layout = Layout(topology=topology, partition_size=setting.partition_size)
    units = traffic_units(preset_of(setting.shape, name="published"), layout, setting.policy)
    if not setting.fused_qkv:
        units = tuple(replace(unit, shapes=_three(unit.shapes)) for unit in units)
    options = Options(
        num_micro_steps=setting.micro_steps,
        hierarchical=setting.hierarchical,
        two_hop=layout.num_replicas > 1,
    )
    traffic = step_traffic(units, options)
    return step_time(units, traffic, setting.work, setting.cluster, setting.overlap)


def _three(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Queries, keys and values of like width as three matrices, where they are one."""
    first, *others = shapes
    if len(first) < 2 or first[0] != 3 * first[1]:
        return shapes
    return ((first[1], first[1]),) * 3 + tuple(others)


def tokens_per_s(setting: Setting) -> float:
    """Of one GPU."""
    return setting.micro_steps * setting.work.tokens / seconds(setting).step_s


def with_share(setting: Setting, share: float) -> Setting:
    """The same on GPUs whose products reach another share of the peak."""
    return replace(setting, cluster=replace(setting.cluster, product_share=share))


def with_gain(setting: Setting, gain: float) -> Setting:
    """The same with products of blocks in float8."""
    operators = replace(setting.work.operators, product_gain=gain)
    return replace(setting, work=replace(setting.work, operators=operators))


def fitted_share(setting: Setting, published: float) -> float:
    """The share of the peak with which a setting takes the published time."""
    low, high = 0.05, 3.0
    for _ in range(50):
        share = (low + high) / 2
        if tokens_per_s(with_share(setting, share)) < published:
            low = share
        else:
            high = share
    return low


def rows_of(belongs: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    return [row for row in DATA["run"] if belongs(row)]


def cluster_of(gpu: str, nic_gbit_per_s: float) -> Cluster:
    """Nodes of 8 on a network that is no EFA, as far as those who published say."""
    name = GPUS[gpu]
    return preset_cluster(
        name=name,
        gpu=name,
        ranks_per_node=8,
        nic_gbit_per_s=nic_gbit_per_s,
        between_curve="between_p5" if name.startswith("H") else "between_p4de",
        fabric="other",
    )


def dense(read: dict[str, Any]) -> ModelShape:
    """The shape of a [[model]]."""
    gated = read.get("family") == "LLaMA"
    return ModelShape(
        num_layers=read["layers"],
        hidden=read["hidden"],
        attention_width=read["hidden"],
        key_value_width=read["hidden"] * read.get("kv_heads", read["heads"]) // read["heads"],
        ffn=read.get("ffn", 4 * read["hidden"]),
        vocab=read["vocab"],
        head_dim=read["hidden"] // read["heads"],
        gated=gated,
        tied=not gated,
    )


def fsdp1(
    row: dict[str, Any],
    shape: ModelShape,
    its: Cluster,
    *,
    profile: str,
    micro_steps: int,
    operators: Operators,
) -> Setting:
    """A run on torch's first FSDP, in bf16; "full" stops early, as torch's default."""
    checkpointing: Checkpointing = "early" if row["activation_checkpoint"] == "full" else "none"
    return Setting(
        shape=shape,
        cluster=its,
        gpus=row["gpus"],
        partition_size=row["partition_group"],
        work=Work(
            shape=shape,
            seq_len=row["seq"],
            micro_batch=row["micro_batch"],
            checkpointing=checkpointing,
            operators=operators,
        ),
        micro_steps=micro_steps,
        overlap=PROFILES[profile].on(its),
        policy=BF16,
    )


def amsp(
    model: str, sizes: tuple[int, int], *, gpus: int, micro_steps: int, overlap: str
) -> Setting:
    """A row of AMSP (S11): parameters and gradients over sizes[0] ranks, states over sizes[1]."""
    (read,) = (each for each in DATA["model"] if each["name"] == model)
    parts = overlap.split("+")
    shape, its = dense(read), cluster_of("A800-80GB", 800)
    return Setting(
        shape=shape,
        cluster=its,
        gpus=gpus,
        partition_size=sizes[0],
        work=Work(
            shape=shape,
            seq_len=4096,
            micro_batch=1,
            checkpointing="none",
            num_states_shards=sizes[1],
            operators=INTERNLM,
        ),
        micro_steps=micro_steps,
        overlap=Overlap(
            gather="ag_rs" in parts,
            reduce="ag_rs" in parts,
            boundary="ar" in parts,
            update="bc" in parts,
        ).on(its),
        policy=Policy(reduce_itemsize=2, hop_itemsize=2, chunked_loss=False),
    )


def amsp_fit() -> float:
    """The A800's share, from the 8-GPU rows of ZeRO-1 and AMSP, which give MFU alone."""
    shares = []
    for row in rows_of(lambda row: row["id"] in ("amsp-zero-1-7b-8", "amsp-amsp-7b-8")):
        setting = amsp("LLaMA-7B", (1, 8), gpus=8, micro_steps=128, overlap="ag_rs+ar+bc")
        speed = row["mfu"] * 312e12 / setting.shape.model_flops(4096)
        shares.append(fitted_share(setting, speed))
    return statistics.mean(shares)


def amsp_cases() -> list[Case]:
    """The 64-GPU table, with and without overlap."""
    share, cases = amsp_fit(), []
    for row in DATA["amsp_overlap"]:
        params, _, states = map(int, row["shard_p_g_os"].split(","))
        for steps, published in zip(row["micro_batches"], row["tok_s_gpu"], strict=True):
            setting = amsp(
                row["model"],
                (params, states),
                gpus=row["gpus"],
                micro_steps=steps,
                overlap=row["overlap"],
            )
            predicted = tokens_per_s(with_share(setting, share))
            name = f"amsp-{row['model']}-{row['overlap']}-{steps}"
            cases.append(Case(name=name, published=published, predicted=predicted))
    return cases

"""Tensor parallel with sequence parallel, as torchtitan 0.3 cuts and sends it. Pure.

Groups lie inside a node. Between the products activations are cut along the sequence; the input of
attention and of the feed-forward is gathered before it, their output is reduced and cut again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import GroupShape, divisors
from mics_dtensor.plan.cluster import Cluster
from mics_dtensor.plan.cost import stage_s
from mics_dtensor.plan.shape import Checkpointing, ModelShape
from mics_dtensor.plan.stage import Collective, Stage
from mics_dtensor.plan.timing import WAYS
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True)
class Message:
    """`count` like collectives of `size_bytes` over a tensor-parallel group, one after another."""

    collective: Collective
    size_bytes: int
    count: float


def uneven_heads(degree: int, *, num_heads: int, num_key_value_heads: int) -> str | None:
    """Why attention cannot be cut over `degree` ranks, in torchtitan's words, and what can be."""
    for name, heads in (("n_heads", num_heads), ("n_kv_heads", num_key_value_heads)):
        if heads % degree:
            both = [n for n in divisors(num_heads) if num_key_value_heads % n == 0]
            return (
                f"tensor_parallel_degree ({degree}) must divide {name} ({heads}); choose from "
                f"{both}"
            )
    return None


def tied_slices(degree: int, *, is_tied: bool, over_replicas: bool) -> str | None:
    """Why the states of a tied table cannot be sharded over the replicas, and what would work."""
    if degree == 1 or not (is_tied and over_replicas):
        return None
    return (
        f"one table for embedding and head, which FSDP2 holds twice under tensor_parallel_degree "
        f"{degree}: mics.optimizer_over_replicas = true has no one slice for it; delete that line, "
        "or write tensor_parallel_degree = 1"
    )


def uneven_length(seq_len: int, unit: int, why: str, *, table: str = "training") -> str | None:
    """Why a sequence cannot be cut into parts that need multiples of `unit` tokens."""
    if seq_len % unit == 0:
        return None
    good = max(unit, seq_len - seq_len % unit)
    return (
        f"{table}.seq_len {seq_len} is not a multiple of {unit}, as wanted by {why}; write "
        f"seq_len = {good}"
    )


def part_of(shape: ModelShape, degree: int) -> ModelShape:
    """What one rank computes with: heads, feed-forward and vocabulary cut. Raises PlanError."""
    heads, key_value_heads = shape.num_heads, shape.num_key_value_heads
    why = uneven_heads(degree, num_heads=heads, num_key_value_heads=key_value_heads)
    if why is not None:
        raise PlanError(why)
    return replace(
        shape,
        attention_width=shape.attention_width // degree,
        key_value_width=shape.key_value_width // degree,
        ffn=-(-shape.ffn // degree),
        vocab=-(-shape.vocab // degree),
    )


def width_of_products(hidden: int, degree: int) -> float:
    """The width that counts for T6: one side of each product is h, the other h over t (F9)."""
    return 2 * hidden / (1 + degree)


def unit_messages(
    unit: Unit,
    shape: ModelShape,
    *,
    tokens: int,
    checkpointing: Checkpointing,
    num_loss_chunks: int = 1,
) -> list[Message]:
    """Of a unit in the forward and backward of `tokens` tokens of a group (T9)."""
    item = unit.gather_itemsize
    gathers = reductions = 0.0  # of activations: in the forward, and its mirror in the backward
    others: list[Message] = []
    if "tok_embeddings" in unit.name:
        gathers, reductions = 1, 1
    if unit.name.startswith("layers"):
        again = _again(shape, checkpointing)
        gathers, reductions = 4 + again[0], 4 + again[1]
        others.append(Message("all_reduce", item * shape.hidden, 2))  # gradients of norms
        if shape.head_norms:
            others.append(Message("all_reduce", item * shape.head_dim, 2))
    if "lm_head" in unit.name:
        gathers, reductions = gathers + 1, reductions + 1
        others.append(Message("all_reduce", item * shape.hidden, 1))
        # Largest logit, sum and the label's own, in fp32, of every slice of the loss.
        others.append(Message("all_reduce", 4 * tokens // num_loss_chunks, 3 * num_loss_chunks))
    activations = item * shape.hidden * tokens
    return [
        Message("all_gather", activations, gathers),
        Message("reduce_scatter", activations, reductions),
        *others,
    ]


def _again(shape: ModelShape, checkpointing: Checkpointing) -> tuple[float, float]:
    """Gathers and reductions of a block's second forward, mean over the blocks.

    By operator torchtitan keeps what was reduced, not what was gathered.
    """
    match checkpointing:
        case "none":
            return 0, 0
        case "op":
            return 2, 0
        case "2":
            share = shape.num_layers // 2 / shape.num_layers
            return 2 * share, 2 * share
        case "full":
            return 2, 2
        case "early":
            return 2, 1


def messages_s(messages: list[Message], degree: int, cluster: Cluster) -> float:
    """Seconds of messages, one after the other, over all groups of a node at once (C1)."""
    group = GroupShape(1, degree, cluster.ranks_per_node // degree)
    seconds = 0.0
    for each in messages:
        moved = WAYS[each.collective] * (degree - 1) * each.size_bytes * group.num_groups
        stage = Stage(
            unit="",
            name="tensor parallel",
            collective=each.collective,
            group=group,
            calls=1,
            inter_node_bytes=0,
            intra_node_bytes=moved,
            every_micro_step=True,
        )
        seconds += each.count * stage_s(stage, cluster)
    return seconds

"""Seconds that a unit computes: its products, its attention, and what it moves beside. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mics_dtensor.plan.cluster import Cluster
from mics_dtensor.plan.operators import EAGER, Operators
from mics_dtensor.plan.shape import Checkpointing, ModelShape
from mics_dtensor.plan.tensor_parallel import part_of, width_of_products
from mics_dtensor.plan.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained in a step: `micro_batch` sequences of `seq_len` tokens a rank and micro-step.

    `num_states_shards` is over how many ranks the optimizer states of a parameter are cut, where
    those are more than its shards: then the updated slices are gathered after the step. Under
    tensor parallel its `tensor_parallel` ranks have the same sequences. The loss is computed in
    `num_loss_chunks` slices.
    """

    shape: ModelShape
    seq_len: int
    micro_batch: int
    checkpointing: Checkpointing
    num_states_shards: int | None = None
    tensor_parallel: int = 1
    num_loss_chunks: int = 1
    operators: Operators = EAGER

    @property
    def part(self) -> ModelShape:
        """What of the shape one rank computes with."""
        return part_of(self.shape, self.tensor_parallel)

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a micro-step."""
        return self.seq_len * self.micro_batch


def unit_compute_s(unit: Unit, work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of one unit's forward and backward in a micro-step, without messages (T2)."""
    forward_s = backward_s = 0.0
    if unit.name.startswith("layers"):
        forward_s, backward_s = _block_s(work, cluster)
    if "lm_head" in unit.name:
        head_s = _head_s(work, cluster)
        forward_s += head_s
        backward_s += 2 * head_s
    return work.tokens * forward_s, work.tokens * backward_s


def _products_per_s(work: Work, cluster: Cluster) -> float:
    width = width_of_products(work.shape.hidden, work.tensor_parallel)
    return cluster.peak_flops_per_s * cluster.share_of_products(width)


def _block_s(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a token in a block. The backward of attention is slower than two forwards."""
    shape, how = work.part, work.checkpointing
    width = width_of_products(work.shape.hidden, work.tensor_parallel)
    kernel = cluster.attention_rate(work.operators.attention, width)
    products_per_s = work.operators.product_gain * _products_per_s(work, cluster)
    attention = shape.attention_flops(work.seq_len)
    attention_s = attention / (cluster.peak_flops_per_s * kernel.share)
    products_s = (shape.block_flops(work.seq_len) - attention) / products_per_s
    moved = shape.block_bytes(
        work.operators, seq_len=work.seq_len, sequence_parts=work.tensor_parallel
    )
    moved_s = moved / cluster.memory_bytes_per_s
    attended = shape.attention_again(how)
    again_s = (shape.recomputed_flops(work.seq_len, how) - attended * attention) / products_per_s
    again_s += attended * attention_s + {"none": 0.0, "2": 0.5}.get(how, 1.0) * moved_s
    backward_s = 2 * (products_s + moved_s) + kernel.backward * attention_s + again_s
    return products_s + attention_s + moved_s, backward_s


def _head_s(work: Work, cluster: Cluster) -> float:
    """Seconds of a token in the forward of the head and the loss."""
    shape = work.part
    whole = work.tensor_parallel == 1
    moved = shape.head_bytes(work.operators) if whole else shape.cut_head_bytes
    products_s = shape.head_flops / _products_per_s(work, cluster)
    return products_s + moved / 3 / cluster.memory_bytes_per_s

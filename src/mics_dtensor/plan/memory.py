"""Bytes of a rank at the peak of a step, by kind. Pure; the equations are in docs/cost_model.md.

A closed form of what FSDP2 and autograd hold for torchtitan's dense decoder under AdamW. A test
holds it against a traced step of the real model (`trace.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mics_dtensor.plan.compute import Work
from mics_dtensor.plan.unit import Unit

CONTEXT_BYTES = 1_000_000_000
"""CUDA's context, cuBLAS's workspace and the libraries' code: assumed, not measured here."""

NCCL_BYTES = 1_000_000_000
"""Buffers of NCCL's channels for a handful of groups: assumed, not measured here."""

FRAGMENTATION = 0.03
"""Share that the caching allocator holds beyond what is used: assumed, not measured here."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What differs between devices. The defaults are CUDA's; `CPU` is what a trace sees."""

    fused_norm: bool = True
    keeps_attention: bool = True  # checkpointing by operator saves what attention returned


CPU = Kernels(fused_norm=False, keeps_attention=False)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """How parameters and their gradients are held; `num_loss_chunks` as [loss] num_chunks.

    `has_masters`: beside the states there are fp32 weights, cut like them. `fp32_sums`: gradients
    are summed in fp32, as by gradient_accumulation; FSDP2 alone sums them in the shards' dtype.
    """

    param_itemsize: int = 4
    has_masters: bool = False
    num_loss_chunks: int = 1
    num_micro_steps: int = 1
    hierarchical: bool = True
    fp32_sums: bool = True
    max_seq_len: int | None = None  # positions of rotary tables, if not those of a sequence
    reserved_bytes: int | None = None
    """Context and communication buffers where they were measured; else they are assumed."""

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of what a step has summed."""
        return 4 if self.fp32_sums else self.param_itemsize

    @property
    def states_itemsize(self) -> int:
        """Bytes that AdamW keeps for an element: two moments, and the master."""
        return 12 if self.has_masters else 2 * self.param_itemsize


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank when most is held. `reserved` is what a trace does not see."""

    parameters: int
    gradients: int
    states: int
    gathered: int
    activations: int
    buffers: int
    reserved: int

    @property
    def traced(self) -> int:
        """All but what is reserved."""
        states = self.parameters + self.gradients + self.states
        return states + self.gathered + self.activations + self.buffers

    @property
    def total(self) -> int:
        """All kinds."""
        return self.traced + self.reserved


@dataclass(frozen=True)
class Moment:
    """What is held at one time of the step, beside parameters and states."""

    gradients: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        """All three."""
        return self.gradients + self.gathered + self.activations


def peak_memory(
    units: Sequence[Unit], work: Work, holding: Holding, kernels: Kernels | None = None
) -> Memory:
    """The largest of the moments of a step (M1). `units` in forward order, blocks as one kind."""
    kernels = kernels or Kernels()
    shape, shard = work.shape, sum(unit.count * unit.shard_numel() for unit in units)
    parameters = shard * holding.param_itemsize
    cut = 1 if work.num_states_shards is None else work.num_states_shards // units[0].shard.size
    states = shard * holding.states_itemsize // cut
    moments = _moments(units, work, holding, kernels)
    peak = max(moments, key=lambda moment: moment.total)
    kept_gathered = sum(
        unit.count * unit.gather_itemsize * unit.numel / unit.regather.size
        for unit in units
        if unit.regather is not None
    )
    positions = holding.max_seq_len or work.seq_len
    buffers = shape.num_layers * positions * shape.head_dim * 4
    gathered = int(peak.gathered + kept_gathered)
    floor = holding.reserved_bytes
    if floor is None:
        floor = CONTEXT_BYTES + NCCL_BYTES
    used = parameters + states + gathered + buffers + int(peak.gradients + peak.activations)
    return Memory(
        parameters=parameters,
        gradients=int(peak.gradients),
        states=states,
        gathered=gathered,
        activations=int(peak.activations),
        buffers=buffers,
        reserved=floor + int(FRAGMENTATION * used),
    )


def block_bytes_per_token(work: Work, kernels: Kernels) -> float:
    """What autograd keeps of a block's forward for one token (M2).

    Two norms with their input and output; queries, keys and values; the rotation; what attention
    returned and its log-sum-exp; gate, activation, up and their product. Under tensor parallel a
    norm has its part of the sequence, and its output is kept whole, as it was gathered.
    """
    shape = work.part
    width, key_value = shape.attention_width, shape.key_value_width
    norm = _norm_bytes(work, kernels) + 2 * shape.hidden
    attention = 2 * (width + 2 * key_value) + 2 * width
    rotation, log_sum = 4 * shape.head_dim, 4 * width // shape.head_dim
    feed_forward = (8 if shape.gated else 4) * shape.ffn
    if shape.head_norms:  # of queries and keys, head by head
        attention += (4 if kernels.fused_norm else 10) * (width + key_value)
        attention += 4 * (width + key_value) // shape.head_dim
    return 2 * norm + attention + rotation + log_sum + feed_forward


def _norm_bytes(work: Work, kernels: Kernels) -> float:
    """What a norm keeps beside its output."""
    return ((2 if kernels.fused_norm else 8) * work.shape.hidden + 4) / work.tensor_parallel


def kept_bytes_per_token(work: Work, kernels: Kernels, blocks: int) -> float:
    """What is kept of the first `blocks` blocks between forward and backward (M3)."""
    shape, parts = work.part, work.tensor_parallel
    hidden, width, key_value = shape.hidden, shape.attention_width, shape.key_value_width
    whole, start = block_bytes_per_token(work, kernels), 2 * hidden / parts
    if work.checkpointing == "none":
        return blocks * whole
    if work.checkpointing == "2":
        return blocks // 2 * start + (blocks - blocks // 2) * whole
    if work.checkpointing == "op":  # of five products the first, third and last: wqkv, w1, w2
        attention = 2 * width + 4 * width // shape.head_dim if kernels.keeps_attention else 0
        products = 2 * (width + 2 * key_value) + 2 * shape.ffn + 2 * hidden
        reduced = 4 * hidden / parts if parts > 1 else 0
        return blocks * (start + products + reduced + attention)
    return blocks * start


def again_bytes_per_token(work: Work, kernels: Kernels, block: int) -> float:
    """What the second forward of a block, counted from 1, adds to what was kept of it (M3)."""
    shape = work.part
    whole = block_bytes_per_token(work, kernels)
    if work.checkpointing == "none" or (work.checkpointing == "2" and block % 2):
        return 0.0
    if work.checkpointing == "op":  # w1 is there, and wqkv is let go when it is rotated
        width = shape.attention_width + 2 * shape.key_value_width
        kept = 2 * shape.attention_width if kernels.keeps_attention else 0
        return whole - 2 * shape.hidden - 2 * shape.ffn - 2 * width - kept
    return whole  # less its input, which was kept, and with its output, which nobody needs


def _moments(
    units: Sequence[Unit], work: Work, holding: Holding, kernels: Kernels
) -> Iterator[Moment]:
    yield from _in_the_head(units, work, holding, kernels)
    yield from _in_the_blocks(units, work, holding, kernels)
    yield _in_the_embedding(units, holding)


def _of(units: Sequence[Unit], part: str) -> Unit:
    return next(unit for unit in units if part in unit.name)


def _gradient_bytes(unit: Unit, holding: Holding) -> float:
    return unit.count * unit.shard_numel() * holding.gradient_itemsize


def _held_before(units: Sequence[Unit], holding: Holding) -> float:
    """Gradients of earlier micro-steps, in full from the second on."""
    return (holding.num_micro_steps > 1) * sum(_gradient_bytes(unit, holding) for unit in units)


def _in_the_head(
    units: Sequence[Unit], work: Work, holding: Holding, kernels: Kernels
) -> Iterator[Moment]:
    """The loss, and then the head's own reduction (M4)."""
    shape, tokens, chunks = work.part, work.tokens, holding.num_loss_chunks
    head, block = _of(units, "lm_head"), _of(units, "layers")
    kept = kept_bytes_per_token(work, kernels, shape.num_layers) * tokens
    norm = (_norm_bytes(work, kernels) + 2 * shape.hidden) * tokens
    # Twice in bf16, twice in fp32; where the vocabulary is cut, four times in fp32.
    logits = (12.0 if work.tensor_parallel == 1 else 16.0) * shape.vocab * tokens / chunks
    if chunks > 1 and work.tensor_parallel > 1:  # copies of the slices, and their gradients in fp32
        logits += 6 * shape.hidden * tokens
    gathered, gradient = head.gather_itemsize * head.numel, head.gather_itemsize * head.numel
    before = _held_before(units, holding)
    yield Moment(before, gathered + (gradient if chunks > 1 else 0.0), kept + norm + logits)
    reduced = gradient + head.reduce_itemsize * head.numel
    ahead = block.gather_itemsize * block.numel
    passing = 2.0 if work.tensor_parallel == 1 else 4.0  # cut again: a copy, part after part
    yield Moment(before, reduced + ahead, kept + passing * shape.hidden * tokens)


def _in_the_blocks(
    units: Sequence[Unit], work: Work, holding: Holding, kernels: Kernels
) -> Iterator[Moment]:
    """A block's backward, with what is gathered ahead and reduced behind it (M5).

    In its feed-forward, and at its end, where all gradients of its parameters are there.

    All is linear in the place of the block, so that the first two and the last two decide.
    """
    shape, tokens, parts = work.part, work.tokens, work.tensor_parallel
    head, block, table = _of(units, "lm_head"), _of(units, "layers"), _of(units, "tok_embeddings")
    # Of the feed-forward: gradients of its product, gate and up, less the product that is freed.
    passing = 2.0 * tokens * (2 * shape.ffn + shape.hidden / parts) + 2.0 * shape.ffn * shape.hidden
    norm = (8 if kernels.fused_norm else 26) * shape.hidden * tokens / parts  # input, gradients
    at_the_norm = _norm_bytes(work, kernels) + 6 * shape.hidden / parts
    before = _held_before(units, holding)
    done_before = _gradient_bytes(head, holding)
    for place in sorted({0, 1, shape.num_layers - 2, shape.num_layers - 1}):
        if not 0 <= place < shape.num_layers:
            continue
        behind = head if place == 0 else block
        ahead = table if place == shape.num_layers - 1 else block
        messages = 1.0 * block.gather_itemsize * block.numel
        messages += ahead.gather_itemsize * ahead.numel
        messages += behind.reduce_itemsize * behind.numel
        if holding.hierarchical and block.shard.num_nodes > 1:  # what the first stage brought
            messages += block.gather_itemsize * block.numel / block.shard.ranks_per_node
        reduced = done_before + place * _gradient_bytes(block, holding) / shape.num_layers
        number = shape.num_layers - place
        held = kept_bytes_per_token(work, kernels, number) * tokens
        again = again_bytes_per_token(work, kernels, number) * tokens
        yield Moment(before or reduced, messages, held + again + passing)
        gradients = block.gather_itemsize * block.numel
        below = kept_bytes_per_token(work, kernels, number - 1) * tokens
        at_the_end = below + 2.0 * shape.hidden * tokens / parts + norm
        yield Moment(before or reduced, messages + gradients, at_the_end)
        if parts > 1:
            for whole in _whole_bytes(work, kernels, number):
                yield Moment(before or reduced, messages, held + again + whole)
            first = below + (4 * shape.hidden + at_the_norm) * tokens
            yield Moment(before or reduced, messages + gradients, first)


def _whole_bytes(work: Work, kernels: Kernels, block: int) -> Iterator[float]:
    """Of a block where its sequence is whole under tensor parallel, beside what is kept (M9).

    The gradient of its output is gathered, and copied into order; where the forward runs again, it
    does so below that gradient, to its own end: the product w2, and a copy of it to be reduced.
    Then the gradient of the feed-forward's input, from w1 and w3, with those of their weights.
    """
    shape, parts, tokens = work.part, work.tensor_parallel, work.tokens
    hidden, again = shape.hidden, again_bytes_per_token(work, kernels, block) > 0
    if not again:
        yield (4 * hidden + 2 * hidden / parts) * tokens
    else:
        cut = 4 if work.checkpointing == "op" else 8  # it keeps what was reduced
        yield (6 * hidden + cut * hidden / parts) * tokens
    kept = (8 if shape.gated else 4) * shape.ffn
    weights = 2 * shape.ffn_products * shape.ffn * hidden
    yield weights + (4 * hidden + 2 * hidden / parts + 2 * shape.ffn - kept) * tokens


def _in_the_embedding(units: Sequence[Unit], holding: Holding) -> Moment:
    """The reduction of the embedding's gradient, after all others (M6)."""
    table = _of(units, "tok_embeddings")
    message = (table.gather_itemsize + table.reduce_itemsize) * table.numel
    gradients = sum(_gradient_bytes(unit, holding) for unit in units)
    return Moment(gradients, float(message), 0.0)

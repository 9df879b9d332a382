"""What to say where no partition size fits: by how much, and what would help. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mics_dtensor.layout import divisors
from mics_dtensor.plan.held import least_bytes
from mics_dtensor.plan.memory import Memory
from mics_dtensor.plan.question import MAX_RANKS, Question, Variant

MOST_TIMES_THE_NODES = 64
SHORTEST_SEQUENCE = 1024


def why_nothing_fits(
    question: Question, variant: Variant, memory: Memory, *, plain_fits: bool
) -> str:
    """`variant` holds least, `memory`; nothing is named as a help that was not tried."""
    of_gpu = question.cluster.memory_bytes
    helps = ["hierarchical = false (plain FSDP over all ranks fits)"] * plain_fits
    helps += [*_checkpointing_and_micro_batch(question, variant), *_over_replicas(question)]
    if more := _nodes(question):
        helps.append(f"{more.num_nodes} nodes hold it, {_as_many(more)}")
    helps += _shorter_sequences(question)
    helps = helps or list(_all_at_once(question))
    nothing = f"GPUs with more memory: {_most_nodes(question):,} nodes do not hold it"
    return (
        f"{question.model.model} {question.model.flavor} does not fit {question.nodes_in_words} "
        f"of {question.cluster.name} in any partition: the least is {memory.total / 1e9:.1f} GB of "
        f"{of_gpu / 1e9:.1f} GB a GPU, {(memory.total - of_gpu) / 1e9:.1f} GB too much "
        f"(partition_size {variant.partition_size}, micro-batch {variant.micro_batch}, "
        f"checkpointing {variant.checkpointing}); what would help: {'; '.join(helps) or nothing}"
    )


def _holds(question: Question) -> bool:
    return least_bytes(question) <= question.cluster.memory_bytes


def _checkpointing_and_micro_batch(question: Question, variant: Variant) -> Iterator[str]:
    """The least change that holds; nothing where both are free, and hence tried already."""
    full = replace(question, checkpointings=("full",))
    if variant.checkpointing != "full" and _holds(full):
        yield "full activation checkpointing"
        return
    smaller = [n for n in divisors(question.sequences_of_a_rank) if n < variant.micro_batch]
    for asked, more in ((question, ""), (full, " with full activation checkpointing")):
        if not smaller or not _holds(replace(asked, micro_batches=tuple(smaller))):
            continue
        for micro_batch in reversed(smaller):
            if _holds(replace(asked, micro_batches=(micro_batch,))):
                yield f"a micro-batch of {micro_batch}{more}"
                return


def _all_at_once(question: Question) -> Iterator[str]:
    """More nodes, or shorter sequences, where the activations of a rank are least besides."""
    full, one = "full" not in question.checkpointings, question.micro_batches not in ((), (1,))
    changes = " and ".join(["full activation checkpointing"] * full + ["micro-batch 1"] * one)
    if not changes:
        return
    frugal = replace(question, checkpointings=("full",), micro_batches=(1,))
    if more := _nodes(frugal):
        yield f"{changes} on {more.nodes_in_words}, {_as_many(more)}"
    for shorter in _shorter_sequences(frugal):
        yield f"{changes} with {shorter}"


def _over_replicas(question: Question) -> Iterator[str]:
    if _holds(replace(question, optimizers_over_replicas=(True,))):
        yield "optimizer states over the replicas (--optimizer-over-replicas)"


def _most_nodes(question: Question) -> int:
    times = MOST_TIMES_THE_NODES * question.num_nodes
    return min(times, MAX_RANKS // question.cluster.ranks_per_node)


def _on(question: Question, num_nodes: int) -> Question:
    """With as many sequences a rank."""
    ranks = num_nodes * question.cluster.ranks_per_node // question.tensor_parallel
    return replace(question, num_nodes=num_nodes, global_batch=question.sequences_of_a_rank * ranks)


def _as_many(question: Question) -> str:
    return f"with as many sequences a rank (global_batch_size {question.global_batch})"


def _nodes(question: Question) -> Question | None:
    """The fewest nodes that hold it, by bisection: more ranks never hold more each."""
    low, most = question.num_nodes, _most_nodes(question)
    high = min(2 * low, most)
    while not _holds(_on(question, high)):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(_on(question, middle)) else (middle, high)
    return _on(question, high)


def _shorter_sequences(question: Question) -> Iterator[str]:
    """The longest power of two that holds, if it is worth a run."""
    length = 2 ** ((question.seq_len - 1).bit_length() - 1)
    while length >= SHORTEST_SEQUENCE:
        if _holds(replace(question, seq_len=length)):
            yield f"sequences of {length:,} tokens"
            return
        length //= 2

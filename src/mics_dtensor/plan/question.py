"""What is asked of the planner, and the variants that may answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout, divisors, partition_sizes
from mics_dtensor.plan.cluster import Cluster
from mics_dtensor.plan.memory import Memory
from mics_dtensor.plan.operators import EAGER, Operators
from mics_dtensor.plan.options import BUCKET_SIZE_BYTES
from mics_dtensor.plan.overlap import Overlap
from mics_dtensor.plan.presets import Preset
from mics_dtensor.plan.presets.units import Policy
from mics_dtensor.plan.shape import Checkpointing
from mics_dtensor.topology import Topology

MAX_RANKS = 2**20
"""A world is written out rank by rank; beyond this it is a slip of the hand."""

MAX_SEQUENCES = 2**20
"""Of a rank in a step: every number that divides them is a micro-batch to be tried."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a partition size is run. `plain` is FSDP over all ranks, one ring a message."""

    partition_size: int
    micro_batch: int
    checkpointing: Checkpointing
    hierarchical: bool = True
    node_local_backward: bool = False
    optimizer_over_replicas: bool = False
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a model, a batch of `global_batch` sequences a step, and a cluster.

    Raises PlanError for more than MAX_RANKS, and for tensor parallel that does not lie in nodes.
    """

    model: Preset
    cluster: Cluster
    num_nodes: int
    seq_len: int
    global_batch: int
    policy: Policy
    overlap: Overlap
    micro_batches: tuple[int, ...] = ()
    """Sequences of a rank in a micro-step; empty: every number that divides the batch."""
    checkpointings: tuple[Checkpointing, ...] = ("none", "op", "full")
    hierarchies: tuple[bool, ...] = (True, False)
    node_local_backwards: tuple[bool, ...] = (False, True)
    optimizers_over_replicas: tuple[bool, ...] = (False,)
    param_itemsize: int = 4
    has_masters: bool = False
    """Where states are cut: fp32 weights in the slices, and shards as they are gathered."""
    num_loss_chunks: int = 1
    bucket_size_bytes: int = BUCKET_SIZE_BYTES
    tensor_parallel: int = 1
    """Ranks of a node that compute one sequence together."""
    operators: Operators = EAGER
    written_partition_size: int | None = None
    """That of the file, whose row is marked."""
    notes: tuple[str, ...] = ()
    """What a reader must know of this question beside its numbers."""
    tracer: Callable[[Question, Layout, Variant], Memory] | None = None
    """Memory by trace (train/tracing.py), of what is fast and fits in closed form."""

    def __post_init__(self) -> None:
        world = self.num_nodes * self.cluster.ranks_per_node
        if world > MAX_RANKS:
            raise PlanError(
                f"{self.num_nodes:,} nodes of {self.cluster.ranks_per_node} are {world:,} ranks; "
                f"the planner goes to {MAX_RANKS:,}: give fewer nodes"
            )
        node, degree = self.cluster.ranks_per_node, self.tensor_parallel
        if degree < 1 or node % degree:
            raise PlanError(
                f"tensor_parallel_degree {degree} does not divide the {node} ranks of a node of "
                f"{self.cluster.name}, inside which it lies; choose from {divisors(node)}"
            )

    @cached_property
    def topology(self) -> Topology:
        """The nodes that are asked about."""
        node = self.cluster.ranks_per_node
        return Topology.uniform(world_size=self.num_nodes * node, ranks_per_node=node)

    @property
    def num_data_ranks(self) -> int:
        """Ranks, or tensor-parallel groups of them, that have sequences of their own."""
        return self.topology.world_size // self.tensor_parallel

    @property
    def reader(self) -> str:
        """Who has sequences of its own, in words."""
        degree = self.tensor_parallel
        return "GPU" if degree == 1 else f"tensor-parallel group of {degree} GPUs"

    def layout(self, partition_size: int) -> Layout:
        """The partition groups of that many shards."""
        return Layout(
            topology=self.topology,
            partition_size=partition_size,
            tensor_parallel_size=self.tensor_parallel,
        )

    def layouts(self) -> list[Layout]:
        """One a partition size, ascending."""
        sizes = partition_sizes(self.topology, tensor_parallel_size=self.tensor_parallel)
        return [self.layout(size) for size in sizes]

    @property
    def nodes_in_words(self) -> str:
        """How many."""
        return f"{self.num_nodes} node{'s'[: self.num_nodes != 1]}"

    def shard_itemsize(self, variant: Variant) -> int:
        """Bytes of an element of a shard."""
        masters = self.has_masters and variant.optimizer_over_replicas
        return self.policy.gather_itemsize if masters else self.param_itemsize

    @property
    def sequences_of_a_rank(self) -> int:
        """In an optimizer step. Raises PlanError where the batch cannot be cut."""
        ranks = self.num_data_ranks
        if self.global_batch < 1 or self.global_batch % ranks:
            who = str(ranks) if self.tensor_parallel == 1 else f"{ranks} data-parallel"
            raise PlanError(
                f"a batch of {self.global_batch} sequences cannot be shared by {who} ranks; give "
                f"a multiple of {ranks} (training.global_batch_size), or other --nodes"
            )
        if (each := self.global_batch // ranks) > MAX_SEQUENCES:
            raise PlanError(
                f"a batch of {self.global_batch:,} sequences is {each:,} a {self.reader} and step; "
                f"the planner goes to {MAX_SEQUENCES:,}: give a smaller "
                "training.global_batch_size, or more --nodes"
            )
        return each


def has_stages(layout: Layout) -> bool:
    """Whether `hierarchical` says something: of the gathers, or of the hop across replicas."""
    return layout.shard_shape.has_two_levels or layout.replicate_shape.has_two_levels


def variants_of(question: Question, layout: Layout, *, plain: bool = False) -> Iterator[Variant]:
    """What may be chosen at a partition size, micro-batches ascending. Raises PlanError."""
    each = question.sequences_of_a_rank
    micro_batches = sorted(question.micro_batches) or divisors(each)
    if wrong := [size for size in micro_batches if each % size]:
        raise PlanError(
            f"{wrong[0]} sequences in a micro-step do not divide the {each} that a rank has in a "
            f"step; choose from {divisors(each)}"
        )
    spans = layout.shard_shape.has_two_levels and not plain
    has_replicas = layout.num_replicas > 1
    for micro_batch, checkpointing, hierarchical, node_local, cut in product(
        micro_batches,
        question.checkpointings,
        question.hierarchies if has_stages(layout) and not plain else (False,),
        question.node_local_backwards if spans else (False,),
        question.optimizers_over_replicas if has_replicas else (False,),
    ):
        if node_local and not hierarchical:
            continue
        yield Variant(
            partition_size=layout.partition_size,
            micro_batch=micro_batch,
            checkpointing=checkpointing,
            hierarchical=hierarchical,
            node_local_backward=node_local,
            optimizer_over_replicas=cut,
            plain=plain,
        )

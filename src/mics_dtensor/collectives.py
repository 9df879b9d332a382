"""The hierarchical all-gather and reduce-scatter of a partition group that spans nodes.

MiCS, arXiv 2205.00119, section 3.2. With p shards on n nodes, the bytes into a node fall from
(p - 1)/p of the message, in p - 1 hops, to (n - 1)/n, in n - 1 hops. FSDP2 calls both through
its AllGather / ReduceScatter interface, on its own streams, in backward and forward alike.

[Note: which buffer lives until when]
The all-gather's input is a view of its output, so the first stage writes to a buffer of its own
(`staged`), and the second reads only that. On CUDA every stage is enqueued on the stream that FSDP2
made current, in order, and nothing here waits on the host. With async_op=False NCCL makes that
stream wait for each stage, so `staged`, allocated on it, may be freed when the call returns: the
caching allocator reuses it only after work enqueued later on the same stream. With async_op=True
(unshard(async_op=True)) the stages run on a side stream, where `staged` is allocated too, and the
Work of the second stage, which the caller waits for, holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mics_dtensor.gloo import cut, gather_on_gloo, reduce_on_gloo
from mics_dtensor.mesh import Stages, ranks_of
from mics_dtensor.stage import StageWork, stage
from mics_dtensor.upstream import AllGather, ReduceScatter, all_gather, coalescing, reduce_scatter


class _Named:
    """What all of them have."""

    def __init__(self, *, unit: str = "") -> None:
        self.unit = unit

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of `size` elements, as FSDP2's default would make it."""
        return torch.empty(*size, dtype=dtype, device=device)


class FlatAllGather(_Named, AllGather):
    """torch's own, as a stage: `unit` names the FSDP unit in errors and traces."""

    def __call__(
        self,
        output_tensor: torch.Tensor,  # [rank, shard], 1-D
        input_tensor: torch.Tensor,  # [shard]
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather [shard] into [rank, shard], both 1-D. Collective over `group`."""
        with stage("gather", self.unit, group):
            work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return _named(work, ("gather", self.unit, group))


class FlatReduceScatter(_Named, ReduceScatter):
    """torch's own, as a stage."""

    def __call__(
        self,
        output_tensor: torch.Tensor,  # [shard]
        input_tensor: torch.Tensor,  # [rank, shard], 1-D
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce [rank, shard] to [shard], both 1-D. Collective over `group`."""
        with stage("reduce", self.unit, group):
            work = reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )
        return _named(work, ("reduce", self.unit, group))


class HierarchicalAllGather(FlatAllGather):
    """Between nodes first, all local ranks in parallel, then inside the node.

    1. across_nodes: each rank exchanges its shard with its peers at the same place in the other
       nodes; it then holds one shard of each node.
    2. within_node: per node, the local ranks exchange those shards. Each block lands at its final
       place, so nothing is re-ordered. One launch on NCCL; on gloo (gloo.py) small blocks come
       at once (but for `by_block`), others one by one, the node's own during the first stage.

    Of any dtype: the stages move bytes. `unit` names the FSDP unit in errors and traces. A group of
    other ranks (integer reshard_after_forward gathers over a smaller one) takes the flat path.
    """

    def __init__(self, stages: Stages, *, unit: str = "", by_block: bool = False) -> None:
        super().__init__(unit=unit)
        self.stages, self.by_block = stages, by_block

    def __call__(
        self,
        output_tensor: torch.Tensor,  # [node, local, shard], 1-D
        input_tensor: torch.Tensor,  # [shard], often a view of output_tensor
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather [shard] into [node, local, shard], both 1-D. Collective over `group`."""
        if not _same_ranks(group, self.stages):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        if _is_gloo(group):
            return gather_on_gloo(
                output_tensor,
                input_tensor,
                stages=self.stages,
                unit=self.unit,
                by_block=self.by_block,
                async_op=async_op,
            )
        with _own_stream(input_tensor.device, wanted=async_op):
            return self._gather(output_tensor, input_tensor, async_op=async_op)

    def _gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, async_op: bool
    ) -> dist.Work | None:
        num_nodes = self.stages.num_nodes
        staged = input_tensor.new_empty(num_nodes * input_tensor.numel())  # [node, shard]
        with stage("gather between nodes", self.unit, self.stages.across_nodes) as across_nodes:
            all_gather(staged, input_tensor, group=across_nodes)  # slow link: n - 1 shards in
        second = ("gather within the node", self.unit, self.stages.within_node)
        blocks = zip(cut(output_tensor, num_nodes), cut(staged, num_nodes), strict=True)
        with stage(*second) as within_node, coalescing(within_node, async_op=async_op) as launched:
            for block, shard in blocks:  # each [local, shard] of one node, over the fast link
                all_gather(block, shard, group=within_node, async_op=async_op)
        return _named(launched.works[-1] if async_op else None, second, staged)


class HierarchicalReduceScatter(FlatReduceScatter):
    """The mirror image: inside the node first, then between nodes.

    1. within_node: per node of the group, the local ranks reduce the block of gradients that
       belongs to that node's ranks; each then holds [node, shard], summed over its node.
    2. across_nodes: each rank keeps its own shard, summed over the nodes.

    Scales exactly once: AVG in both stages, or PREMUL_SUM in the first and SUM in the second. On
    gloo (gloo.py) what other nodes wait for goes first, and sums are ours, in fp32.
    """

    def __init__(self, stages: Stages, *, unit: str = "", by_block: bool = False) -> None:
        super().__init__(unit=unit)
        self.stages, self.by_block = stages, by_block

    def __call__(
        self,
        output_tensor: torch.Tensor,  # [shard]
        input_tensor: torch.Tensor,  # [node, local, shard], 1-D
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce [node, local, shard] to [shard], both 1-D. Collective over `group`."""
        if not _same_ranks(group, self.stages):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        if _is_gloo(group):
            return reduce_on_gloo(
                output_tensor,
                input_tensor,
                op,
                stages=self.stages,
                unit=self.unit,
                by_block=self.by_block,
                async_op=async_op,
            )
        with _own_stream(input_tensor.device, wanted=async_op):
            return self._reduce(output_tensor, input_tensor, op, async_op=async_op)

    def _reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        *,
        async_op: bool,
    ) -> dist.Work | None:
        num_nodes = self.stages.num_nodes
        staged = output_tensor.new_empty(num_nodes * output_tensor.numel())  # [node, shard]
        blocks = zip(cut(staged, num_nodes), cut(input_tensor, num_nodes), strict=True)
        first = ("reduce within the node", self.unit, self.stages.within_node)
        with stage(*first) as within_node, coalescing(within_node, async_op=False):
            for shard, block in blocks:  # from [local, shard] of one node, over the fast link
                reduce_scatter(shard, block, group=within_node, op=op)
        second = ("reduce between nodes", self.unit, self.stages.across_nodes)
        once_more = dist.ReduceOp.SUM if op == dist.ReduceOp.PREMUL_SUM else op
        with stage(*second) as across_nodes:  # slow link: n - 1 shards out
            work = reduce_scatter(
                output_tensor, staged, group=across_nodes, op=once_more, async_op=async_op
            )
        return _named(work, second, staged)


def _named(
    work: dist.Work | None, named: tuple[str, str, dist.ProcessGroup], *buffers: torch.Tensor
) -> dist.Work | None:
    return None if work is None else StageWork(work, named, *buffers)


def _same_ranks(group: dist.ProcessGroup, stages: Stages) -> bool:
    # By ranks, not by object or name: set_separate_reduce_scatter_group passes another object.
    return ranks_of(group) == stages.ranks


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == dist.Backend.GLOO


@contextmanager
def _own_stream(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """A side stream for asynchronous stages, so that the caller's does not wait between them."""
    if not wanted or device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        yield

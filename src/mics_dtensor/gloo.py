"""The two stages on gloo, each working while the other waits for the network.

NCCL runs its stages on streams; on gloo a call returns when its message is here, so what can happen
meanwhile has to be written down. Gloo has no launch of several collectives and its reduce-scatter
moves the bytes of an all-reduce: sums are made here, in fp32, of what an exchange has brought.
Blocks of up to WHOLE_BLOCK_BYTES cost more in calls than these hide: there a stage is one call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mics_dtensor.mesh import Stages
from mics_dtensor.plan.options import WHOLE_BLOCK_BYTES
from mics_dtensor.stage import StageWork, stage
from mics_dtensor.upstream import all_gather


def gather_on_gloo(
    output_tensor: torch.Tensor,  # [node, local, shard], 1-D
    input_tensor: torch.Tensor,  # [shard], often a view of output_tensor
    *,
    stages: Stages,
    unit: str,
    by_block: bool,
    async_op: bool,
) -> dist.Work | None:
    """Gather between nodes; meanwhile, inside the node, what the node has itself; then the rest.

    Collective over `stages.ranks`. The Work of the last message if `async_op`.
    """
    num_nodes, me = stages.num_nodes, stages.across_nodes.rank()
    first = ("gather between nodes", unit, stages.across_nodes)
    second = ("gather within the node", unit, stages.within_node)
    if output_tensor.nbytes <= num_nodes * WHOLE_BLOCK_BYTES and not by_block:
        return _gather_at_once(output_tensor, input_tensor, first, second, async_op=async_op)
    mine = input_tensor.clone()  # is still sent while the second stage writes the output
    staged = mine.new_empty(num_nodes * mine.numel())  # [node, shard]
    with stage(*first) as across_nodes:  # slow link: num_nodes - 1 shards in
        arriving = all_gather(staged, mine, group=across_nodes, async_op=True)
    blocks, shards = cut(output_tensor, num_nodes), cut(staged, num_nodes)
    with stage(*second) as within_node:  # fast link: [local, shard] of this node
        all_gather(blocks[me], mine, group=within_node)
    with stage(*first):
        _wait(arriving)
    *others, last = [node for node in range(num_nodes) if node != me]
    with stage(*second) as within_node:
        for node in others:
            all_gather(blocks[node], shards[node], group=within_node)
        work = all_gather(blocks[last], shards[last], group=within_node, async_op=async_op)
    return None if work is None else StageWork(work, second, staged)


def reduce_on_gloo(
    output_tensor: torch.Tensor,  # [shard]
    input_tensor: torch.Tensor,  # [node, local, shard], 1-D
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    *,
    stages: Stages,
    unit: str,
    by_block: bool,
    async_op: bool,
) -> dist.Work | None:
    """Reduce the blocks of other nodes first: each travels while the next is reduced.

    Collective over `stages.ranks`. The Work of a barrier if `async_op`: the sum is there.
    """
    num_nodes, me = stages.num_nodes, stages.across_nodes.rank()
    first = ("reduce within the node", unit, stages.within_node)
    second = ("reduce between nodes", unit, stages.across_nodes)
    is_mean = op == dist.ReduceOp.AVG
    if input_tensor.nbytes <= num_nodes * WHOLE_BLOCK_BYTES and not by_block:
        return _reduce_at_once(
            output_tensor, input_tensor, first, second, is_mean=is_mean, async_op=async_op
        )
    blocks = cut(input_tensor, num_nodes)
    received = output_tensor.new_empty(num_nodes * output_tensor.numel())  # [node, shard]: mine
    places = cut(received, num_nodes)
    on_the_way: list[dist.Work | None] = []
    for hop in range(1, num_nodes + 1):  # the last is our own
        to, source = (me + hop) % num_nodes, (me - hop) % num_nodes
        with stage(*first) as within_node:  # fast link: from [local, shard] of one node
            parts = torch.empty_like(blocks[to])
            dist.all_to_all_single(parts, blocks[to], group=within_node)
            shard = _sum(parts, within_node.size(), is_mean=is_mean)
        if to == me:
            places[me].copy_(shard)
            break
        with stage(*second) as across_nodes:  # slow link: num_nodes - 1 shards out in all
            on_the_way.append(dist.irecv(places[source], group=across_nodes, group_src=source))
            on_the_way.append(dist.isend(shard, group=across_nodes, group_dst=to))
    with stage(*second) as across_nodes:
        for message in on_the_way:
            _wait(message)
        output_tensor.copy_(_sum(received, num_nodes, is_mean=is_mean))
        work = dist.barrier(group=across_nodes, async_op=True) if async_op else None
    return None if work is None else StageWork(work, second)


Named = tuple[str, str, dist.ProcessGroup]
"""As of `stage`: what, unit, group."""


def _gather_at_once(
    output_tensor: torch.Tensor,  # [node, local, shard], 1-D
    input_tensor: torch.Tensor,  # [shard]
    first: Named,
    second: Named,
    *,
    async_op: bool,
) -> dist.Work | None:
    with stage(*first) as across_nodes:
        # To every peer itself: gloo's ring hands a shard on, and waits n - 1 times until a rank
        # gets to run, which takes longer than a small message.
        mine = input_tensor.repeat(across_nodes.size())
        staged = mine.new_empty(mine.numel())  # [node, shard]
        dist.all_to_all_single(staged, mine, group=across_nodes)
    with stage(*second) as within_node:
        arrived = output_tensor.new_empty(output_tensor.numel())  # [local, node, shard]
        all_gather(arrived, staged, group=within_node)
        _turn(output_tensor, arrived, within_node.size(), across_nodes.size())
        work = dist.barrier(group=within_node, async_op=True) if async_op else None
    return None if work is None else StageWork(work, second)


def _reduce_at_once(
    output_tensor: torch.Tensor,  # [shard]
    input_tensor: torch.Tensor,  # [node, local, shard], 1-D
    first: Named,
    second: Named,
    *,
    is_mean: bool,
    async_op: bool,
) -> dist.Work | None:
    num_nodes = second[-1].size()
    with stage(*first) as within_node:
        sent = input_tensor.new_empty(input_tensor.numel())  # [local, node, shard]
        _turn(sent, input_tensor, num_nodes, within_node.size())
        parts = sent.new_empty(sent.numel())  # of [node, shard] each, one from every local rank
        dist.all_to_all_single(parts, sent, group=within_node)
        summed = _sum(parts, within_node.size(), is_mean=is_mean)
    with stage(*second) as across_nodes:
        received = summed.new_empty(summed.numel())  # [node, shard]: mine
        dist.all_to_all_single(received, summed, group=across_nodes)
        output_tensor.copy_(_sum(received, num_nodes, is_mean=is_mean))
        work = dist.barrier(group=across_nodes, async_op=True) if async_op else None
    return None if work is None else StageWork(work, second)


def _turn(target: torch.Tensor, source: torch.Tensor, rows: int, columns: int) -> None:
    """Copy [row, column, shard] to [column, row, shard], both 1-D."""
    shard = source.numel() // (rows * columns)
    turned = source.view(rows, columns, shard).transpose(0, 1)
    target.view(columns, rows, shard).copy_(turned)


def cut(flat: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Equal blocks, in order; chunk() would make one of an empty tensor's two."""
    return flat.view(num_blocks, flat.numel() // num_blocks).unbind()


def _sum(parts: torch.Tensor, num_parts: int, *, is_mean: bool) -> torch.Tensor:
    """The sum or mean of equal parts, in their order, in fp32 at least; of the dtype of `parts`."""
    narrow = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts.view(num_parts, parts.numel() // num_parts).sum(
        dim=0, dtype=torch.float32 if narrow else parts.dtype
    )
    return (total / num_parts if is_mean else total).to(parts.dtype)


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None where this rank has no part in it
        work.wait()

"""The two stages equal the one: bit for bit for gathers, within rounding for reductions."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks

from mics_dtensor import collectives, gloo
from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from mics_dtensor.mesh import Stages, make_stages
from mics_dtensor.topology import Topology

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
SIZES = (0, 1, 3, 17, 4097)  # elements of one shard
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}


def partition_group(size: int, ranks_per_node: int) -> tuple[dist.ProcessGroup, Stages]:
    """The world in consecutive partition groups; this rank's group, and its stages."""
    world = dist.get_world_size()
    all_of_them = [tuple(range(first, first + size)) for first in range(0, world, size)]
    topology = Topology.uniform(world_size=world, ranks_per_node=ranks_per_node)
    (stages,) = make_stages(all_of_them, topology, device_type="cpu").values()
    groups = [dist.new_group(list(members)) for members in all_of_them]
    return groups[dist.get_rank() // size], stages


def shard(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 200, (numel,), generator=generator).to(dtype)


def poisoned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), float("nan") if dtype.is_floating_point else 99, dtype=dtype)


@contextmanager
def poisoned_staging() -> Iterator[None]:
    """What the stages allocate is full of NaN, in place of zeros that the system may hand out."""
    new_empty = torch.Tensor.new_empty

    def new_poisoned(tensor: torch.Tensor, numel: int) -> torch.Tensor:
        made = new_empty(tensor, numel)
        return made.fill_(float("nan") if made.dtype.is_floating_point else 99)

    with mock.patch.object(torch.Tensor, "new_empty", new_poisoned):
        yield


def expect_gathers_equal_flat(size: int, ranks_per_node: int) -> None:
    group, stages = partition_group(size, ranks_per_node)
    gather = HierarchicalAllGather(stages, unit="layers.0")
    for dtype in DTYPES:
        for numel in SIZES:
            mine, case = shard(numel, dtype), (size, ranks_per_node, dtype, numel)
            flat = poisoned(size * numel, dtype)
            collectives.all_gather(flat, mine, group=group)
            for async_op in (False, True):
                gathered = gather.allocate((size * numel,), dtype=dtype, device=mine.device)
                gathered.copy_(poisoned(size * numel, dtype))
                view = gathered.narrow(0, group.rank() * numel, numel)
                view.copy_(mine)  # FSDP2's input is a view of its output
                with poisoned_staging():
                    work = gather(gathered, view, group, async_op)
                if async_op:
                    assert isinstance(work, dist.Work)
                    work.wait()
                else:
                    assert work is None
                assert torch.equal(gathered, flat), case


def expect_reductions_equal_flat(size: int, ranks_per_node: int) -> None:
    group, stages = partition_group(size, ranks_per_node)
    reduce = HierarchicalReduceScatter(stages, unit="layers.0")
    for dtype, tolerance in TOLERANCE.items():
        for numel in SIZES:
            gradients = shard(size * numel, dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                flat = poisoned(numel, dtype)
                collectives.reduce_scatter(flat, gradients.clone(), group=group, op=op)
                for async_op in (False, True):
                    reduced = poisoned(numel, dtype)
                    with poisoned_staging():
                        work = reduce(reduced, gradients.clone(), group, op, async_op)
                    assert (work is not None) == async_op
                    if work is not None:
                        assert isinstance(work, dist.Work)
                        work.wait()
                    difference = (reduced - flat).abs().max().item() if numel else 0.0
                    largest = flat.abs().max().item() if numel else 1.0
                    case = (size, ranks_per_node, dtype, numel, op)
                    assert difference <= tolerance * largest, case


def expect_stages_equal_flat(size: int, ranks_per_node: int) -> None:
    """As they are, and as if the blocks were large: one by one."""
    for largest in (gloo.WHOLE_BLOCK_BYTES, -1):
        with mock.patch.object(gloo, "WHOLE_BLOCK_BYTES", largest):
            expect_gathers_equal_flat(size, ranks_per_node)
            expect_reductions_equal_flat(size, ranks_per_node)


@ranks(8)
def test_two_stages_equal_one_on_2x2_2x4_4x2() -> None:
    for size, ranks_per_node in ((4, 2), (8, 4), (8, 2)):
        expect_stages_equal_flat(size, ranks_per_node)


@ranks(6)
def test_two_stages_equal_one_on_3x2() -> None:
    expect_stages_equal_flat(6, 2)


@ranks(8)
def test_blocks_of_any_size_are_summed_alike_bit_for_bit() -> None:
    """In the order of the local ranks, then of the nodes, whether at once or one by one."""
    group, stages = partition_group(8, 2)
    reduce = HierarchicalReduceScatter(stages)
    gradients = shard(8 * 4097, torch.float32)
    sums = []
    for largest in (1 << 20, -1):
        with mock.patch.object(gloo, "WHOLE_BLOCK_BYTES", largest):
            sums.append(poisoned(4097, torch.float32))
            reduce(sums[-1], gradients.clone(), group, dist.ReduceOp.AVG)
    assert torch.equal(*sums)


@ranks(8)
def test_strided_groups_of_tensor_parallel_ranks() -> None:
    """Shard groups (0, 2, 4, 6) and (1, 3, 5, 7) on two nodes: tp of 2 sits innermost."""
    all_of_them = [(0, 2, 4, 6), (1, 3, 5, 7)]
    topology = Topology.uniform(world_size=8, ranks_per_node=4)
    stages = make_stages(all_of_them, topology, device_type="cpu")
    group = [dist.new_group(list(members)) for members in all_of_them][dist.get_rank() % 2]
    (its,) = stages.values()
    assert its.num_nodes == 2
    mine = shard(5, torch.float32)
    flat, gathered = poisoned(20, torch.float32), poisoned(20, torch.float32)
    collectives.all_gather(flat, mine, group=group)
    HierarchicalAllGather(its)(gathered, mine, group)
    assert torch.equal(gathered, flat)


@ranks(4)
def test_the_ranks_of_a_group_decide_not_the_object() -> None:
    """Hazards 2.2: separate reduce-scatter groups, and smaller ones of integer reshard."""
    group, stages = partition_group(4, 2)
    other_object = dist.new_group([0, 1, 2, 3])
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    staged: list[str] = []

    def told(what: str, *_: object) -> None:
        staged.append(what)

    recording = _recording(told)
    gather, reduce = HierarchicalAllGather(stages), HierarchicalReduceScatter(stages)
    mine = shard(3, torch.float32)
    for its, num_shards, num_stages in ((group, 4, 2), (other_object, 4, 2), (pair, 2, 1)):
        for async_op in (False, True):
            with (
                mock.patch.multiple(collectives, stage=recording),
                mock.patch.multiple(gloo, stage=recording),
            ):
                flat, gathered = (poisoned(num_shards * 3, torch.float32) for _ in range(2))
                collectives.all_gather(flat, mine, group=its)
                work = gather(gathered, mine, its, async_op)
                if work is not None:
                    work.wait()
                assert torch.equal(gathered, flat)
                assert len({*staged}) == num_stages, staged
                staged.clear()
                summed = poisoned(3, torch.float32)
                work = reduce(summed, gathered.clone(), its, dist.ReduceOp.SUM, async_op)
                if work is not None:
                    work.wait()
                assert torch.allclose(summed, num_shards * mine, rtol=1e-6)
                assert len({*staged}) == num_stages, staged
                staged.clear()


@ranks(4)
def test_groups_inherit_the_timeout_and_need_every_rank() -> None:
    _, stages = partition_group(4, 2)
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(stages.across_nodes) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(stages.within_node) == [rank // 2 * 2, rank // 2 * 2 + 1]
    world = dist.group.WORLD
    assert world is not None
    for made in (stages.across_nodes, stages.within_node):
        ours, theirs = (g._get_backend(torch.device("cpu")).options for g in (made, world))
        assert ours._timeout == theirs._timeout


@pytest.mark.parametrize("ranks_per_node", [1, 4])
@ranks(4)
def test_nothing_is_made_where_one_stage_does_all(ranks_per_node: int) -> None:
    topology = Topology.uniform(world_size=4, ranks_per_node=ranks_per_node)
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("made a group")):
        assert make_stages([(0, 1, 2, 3)], topology, device_type="cpu") == {}


def _recording(told: object) -> object:
    real = collectives.stage

    @contextmanager
    def recorded(what: str, unit: str, group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
        told(what)  # type: ignore[operator]
        with real(what, unit, group) as its:
            yield its

    return recorded

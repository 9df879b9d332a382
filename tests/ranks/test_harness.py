"""The ranks of a test are real, and what goes wrong on one of them is seen."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness.ranks import RanksFailed, ranks, run_on_ranks


@ranks(3)
def test_every_rank_is_there() -> None:
    mine = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(mine)
    assert mine.item() == 6.0
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("factor", [2, 5])
@ranks(2)
@pytest.mark.parametrize("start", [0, 1])
def test_parameters_reach_the_ranks(factor: int, start: int) -> None:
    mine = torch.tensor([start + factor * dist.get_rank()])
    dist.all_reduce(mine)
    assert mine.item() == 2 * start + factor


@ranks(2)
def test_every_rank_starts_from_the_same_seed() -> None:
    mine = torch.rand(4)
    theirs = [torch.empty(4) for _ in range(2)]
    dist.all_gather(theirs, mine)
    assert torch.equal(theirs[0], theirs[1])


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    def fail_on_rank_1() -> None:
        value = dist.get_rank()
        assert value != 1, "one is odd"

    with pytest.raises(RanksFailed, match=r"rank 1 of 2 failed:(.|\n)*one is odd") as caught:
        run_on_ranks(2, fail_on_rank_1, timeout_s=30)
    assert "rank 0" not in str(caught.value)
    assert "fail_on_rank_1" in str(caught.value)


def test_a_rank_that_waits_for_a_failed_one_is_ended_and_says_where_it_stood() -> None:
    def fail_before_the_barrier() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("no barrier for me")
        dist.barrier()

    start_s = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(2, fail_before_the_barrier, timeout_s=60)
    assert "no barrier for me" in str(caught.value)
    assert "rank 1 did not finish" in str(caught.value)
    assert "fail_before_the_barrier" in str(caught.value).split("rank 1 did not finish")[1]
    assert time.monotonic() - start_s < 30


def test_a_hang_is_a_failure_that_says_so() -> None:
    def hang_on_rank_0() -> None:
        while dist.get_rank() == 0:
            time.sleep(0.1)

    said = r"rank 0 did not finish.*after\s2 s(.|\n)*hang_on_rank_0"
    with pytest.raises(RanksFailed, match=said):
        run_on_ranks(2, hang_on_rank_0, timeout_s=2)


def test_a_rank_that_dies_is_a_failure() -> None:
    def die_on_rank_1() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailed, match=r"rank 1 died without a word \(signal SIGKILL"):
        run_on_ranks(2, die_on_rank_1, timeout_s=30)


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 of 1 failed:(.|\n)*SystemExit"):
        run_on_ranks(1, lambda: exit(0), timeout_s=30)


def test_a_skip_needs_every_rank() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_on_ranks(2, lambda: pytest.skip("not today"), timeout_s=30)
    with pytest.raises(RanksFailed, match="1 of 2 ranks skipped"):
        run_on_ranks(2, lambda: pytest.skip("no") if dist.get_rank() else None, timeout_s=30)

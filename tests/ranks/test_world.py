"""An error that some ranks have is told on all of them, and none waits for another."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness.ranks import ranks

from mics_dtensor.errors import CheckpointError, CommunicationError, ConfigError, TopologyError
from mics_dtensor.world import agreed


@ranks(3)
def test_what_no_rank_refuses_is_answered() -> None:
    assert agreed(lambda: dist.get_rank() * 10) == dist.get_rank() * 10
    assert agreed(lambda: None) is None


@ranks(3)
def test_what_some_ranks_refuse_is_refused_on_every_rank() -> None:
    def question(*refusing: int) -> None:
        if dist.get_rank() in refusing:
            raise (TopologyError, ConfigError, ConfigError)[dist.get_rank()]("the file is not here")

    with pytest.raises(ConfigError, match=r"^the file is not here \(on rank 1\)$"):
        agreed(lambda: question(2, 1))
    for refusing in ((0,), (0, 1), (0, 1, 2)):
        with pytest.raises(TopologyError, match=r"^the file is not here$"):
            agreed(lambda refusing=refusing: question(*refusing))
    assert agreed(lambda: 1) == 1


@ranks(3)
def test_what_every_rank_refuses_names_no_rank() -> None:
    def question() -> None:
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match=r"^no such file$"):
        agreed(question)


@ranks(3)
def test_an_error_that_is_not_ours_is_told_or_raised() -> None:
    def question() -> None:
        if dist.get_rank() == 1:
            open("/nowhere/at/all")  # noqa: SIM115

    with pytest.raises(CheckpointError, match=r"^No such file .*: /nowhere/at/all \(on rank 1\)$"):
        agreed(question, others_as=CheckpointError)
    its = FileNotFoundError if dist.get_rank() == 1 else CommunicationError
    with pytest.raises(its, match=r"No such file or directory: .*/nowhere/at/all"):
        agreed(question)
    assert agreed(lambda: 1) == 1


def test_one_process_is_a_world_of_one() -> None:
    def question() -> None:
        raise OSError(28, "No space left on device")

    assert agreed(lambda: 5) == 5
    with pytest.raises(CheckpointError, match=r"^No space left on device$"):
        agreed(question, others_as=CheckpointError)
    with pytest.raises(OSError, match="No space left"):
        agreed(question)

from pathlib import Path

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train import launch
from mics_dtensor.train.launch import Launch, say_and_stop

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_the_launcher_is_read() -> None:
    read = Launch.read(TORCHRUN)
    assert read == Launch(rank=3, local_rank=1, world_size=4, local_world_size=2)


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_a_process_that_torchrun_did_not_start_is_told_how_to(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigError, match=f"'{name}' is not there; .*torchrun --nproc-per-node"):
        Launch.read(environ)


@pytest.mark.parametrize(
    ("rank", "local_rank", "says"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)]
)
def test_a_refusal_is_one_sentence_and_a_status(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local_rank: int,
    says: bool,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    status = say_and_stop(ConfigError("this cannot be"), rank=rank, local_rank=local_rank)
    assert status == 1
    assert capsys.readouterr().err == ("error: this cannot be\n" if says else "")
    assert bool(waited) == (rank != 0)


def test_torchruns_report_ends_with_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun reads this file, and shows what it finds in place of a traceback."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    say_and_stop(ConfigError("this cannot be"), rank=0, local_rank=0)
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json")
    )
    assert "error: this cannot be" in str(ChildFailedError("train", {0: failure}))

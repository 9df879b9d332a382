"""`mics plan --trace`: the run's own model, traced once, kept, and near the closed form."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from mics_dtensor.cli import main
from mics_dtensor.errors import PlanError
from mics_dtensor.train import tracing

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    ask = ["plan", "--config-file", str(FILE), "--cluster", "p4de", "--nodes", "2", "--json"]
    ask += ["--as-written", "--training.global_batch_size", "16", "--training.seq_len", "1024"]
    assert main([*ask, "--training.local_batch_size", "1", *arguments]) == 0
    told = capsys.readouterr().out
    return json.loads(told[told.index("{") :])  # type: ignore[no-any-return]


def test_m8_the_trace_of_a_run_is_near_the_closed_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every partition size from two traces; asked again, none is made."""
    closed = planned(capsys)
    traced = planned(capsys, "--trace", "--trace-cache", str(tmp_path))
    assert (closed["memory_from"], traced["memory_from"]) == ("closed form", "trace")
    assert len(closed["rows"]) == len(traced["rows"]) == 6  # type: ignore[arg-type]
    for one, other in zip(closed["rows"], traced["rows"], strict=True):  # type: ignore[call-overload]
        assert one["variant"] == other["variant"]
        ours, true = one["memory_bytes"]["total"], other["memory_bytes"]["total"]
        assert ours == pytest.approx(true, rel=0.03)
        assert ours != true
    assert len(list(tmp_path.glob("*.json"))) == 1

    def never(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(tracing, "trace", never)
    assert planned(capsys, "--trace", "--trace-cache", str(tmp_path)) == traced
    (kept,) = tmp_path.glob("*.json")
    kept.write_text("{}")
    with pytest.raises(AssertionError):
        planned(capsys, "--trace", "--trace-cache", str(tmp_path))


@pytest.mark.parametrize("degree", ["2", "8"])
def test_m8_under_tensor_parallel(
    degree: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cut = ("--parallelism.tensor_parallel_degree", degree)
    closed = planned(capsys, *cut)
    traced = planned(capsys, *cut, "--trace", "--trace-cache", str(tmp_path))
    assert (closed["memory_from"], traced["memory_from"]) == ("closed form", "trace")
    for one, other in zip(closed["rows"], traced["rows"], strict=True):  # type: ignore[call-overload]
        assert one["variant"] == other["variant"]
        ours, true = one["memory_bytes"]["total"], other["memory_bytes"]["total"]
        assert ours == pytest.approx(true, rel=0.03)
        assert ours != true
    planned(capsys, "--trace", "--trace-cache", str(tmp_path))  # another model: traced by itself
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_world_that_runs_is_not_disturbed() -> None:
    with (
        tracing.fake_world(8),
        pytest.raises(PlanError, match="a world of its own"),
        tracing.fake_world(8),
    ):
        pass

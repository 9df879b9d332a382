"""[mics] optimizer_over_replicas: the same run, on 1/R of the optimizer states."""

import json
import warnings
from pathlib import Path

import pytest
from harness.ranks import ranks

from mics_dtensor.errors import ConfigError

pytest.importorskip("torchtitan")
from train.small_run import configured, ours, train, trained_by

MASTERS = "--mics.master_weights=sharded"


@pytest.mark.timeout(300)
def test_the_run_is_that_of_whole_states(tmp_path: Path) -> None:
    options = ("--training.steps=8", "--training.global_batch_size=8")
    sliced = "--mics.optimizer_over_replicas=true"
    expected = trained_by(ours, tmp_path, *options)
    got = trained_by(ours, tmp_path, *options, sliced)
    assert len(got.losses) == 8
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)  # sums in another order


@pytest.mark.timeout(300)
def test_the_run_is_the_same_with_fp32_weights_in_the_slices_alone(tmp_path: Path) -> None:
    options = (
        "--training.steps=8",
        "--training.global_batch_size=8",
        "--training.mixed_precision_param=bfloat16",
        "--mics.optimizer_over_replicas=true",
    )
    expected = trained_by(ours, tmp_path, *options)
    assert trained_by(ours, tmp_path, *options, MASTERS) == expected


@pytest.mark.parametrize("masters", ["fp32", "sharded"])
@ranks(4, timeout_s=110)
def test_a_resumed_run_goes_on_alike(tmp_path: Path, masters: str) -> None:
    options = (
        "--mics.optimizer_over_replicas=true",
        f"--mics.master_weights={masters}",
        "--training.mixed_precision_param=bfloat16",
        "--training.global_batch_size=8",
        "--training.steps=5",
        "--checkpoint.enable=true",
        "--checkpoint.interval=3",
        "--checkpoint.last_save_model_only=false",
    )
    whole = train(ours, tmp_path, *options)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["collectives"]["all_to_all"] > 0 for line in lines)  # slices
    with warnings.catch_warnings():
        # torchtitan 0.3.0 asks the scheduler get_lr() when it resumes, whatever the optimizer.
        warnings.filterwarnings("ignore", "To get the last learning rate", UserWarning)
        again = ("--checkpoint.load_step=3", "--checkpoint.load_only=true")
        resumed = train(ours, tmp_path, *options, *again)
    assert len(resumed.losses) == 2
    assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-6)


@ranks(2, timeout_s=100)
def test_what_it_refuses(tmp_path: Path) -> None:
    sliced = ("--mics.optimizer_over_replicas=true", "--training.global_batch_size=4")
    with pytest.raises(ConfigError, match="would be ignored"):
        configured(tmp_path, *sliced, "--optimizer.implementation=fused_opt_states_bf16")
    with pytest.raises(ConfigError, match="DistMuon looks at more than one element"):
        configured(tmp_path, *sliced, "--optimizer.name=DistMuon")

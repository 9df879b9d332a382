"""[mics] optimizer_over_replicas: the same run, on 1/R of the optimizer states."""

from pathlib import Path
from typing import Any

import pytest
from harness.ranks import ranks

from mics_dtensor.errors import ConfigError

pytest.importorskip("torchtitan")
from train.small_run import configured, ours, train, trained_by

from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of


@pytest.mark.timeout(300)
def test_the_run_is_that_of_whole_states(tmp_path: Path) -> None:
    options = ("--training.steps=8", "--training.global_batch_size=8")
    sliced = "--mics.optimizer_over_replicas=true"
    expected = trained_by(ours, tmp_path, *options)
    got = trained_by(ours, tmp_path, *options, sliced)
    assert len(got.losses) == 8
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)  # sums in another order


@ranks(4, timeout_s=110)
def test_states_are_a_share_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    options = (
        "--mics.optimizer_over_replicas=true",
        "--training.global_batch_size=8",
        "--checkpoint.enable=true",
        "--checkpoint.interval=3",
        "--checkpoint.last_save_model_only=false",
    )
    config, layout = configured(tmp_path, *options, "--training.steps=3")
    trainer: Any = ours(config, layout)
    trainer.train()
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, ReplicaShardedOptimizer)
    held = sum(states["exp_avg"].flat.numel() for states in optimizer.state.values())
    shards = sum(local_of(p).numel() for part in trainer.model_parts for p in part.parameters())
    assert abs(held - shards / 2) < 2 * 4  # of 2 replicas, in each of at most 4 units
    trainer.close()
    resumed = train(ours, tmp_path, *options, "--training.steps=5")
    assert len(resumed.losses) == 5


@ranks(2, timeout_s=100)
def test_what_it_refuses(tmp_path: Path) -> None:
    sliced = ("--mics.optimizer_over_replicas=true", "--training.global_batch_size=4")
    with pytest.raises(ConfigError, match="would be ignored"):
        configured(tmp_path, *sliced, "--optimizer.implementation=fused_opt_states_bf16")
    with pytest.raises(ConfigError, match="DistMuon looks at more than one element"):
        configured(tmp_path, *sliced, "--optimizer.name=DistMuon")

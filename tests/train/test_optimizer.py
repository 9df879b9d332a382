"""[mics] optimizer_over_replicas: the same run, on 1/R of the optimizer states."""

import json
import warnings
from pathlib import Path

import pytest
from harness.late import hold_back
from harness.ranks import ranks

from mics_dtensor.checkpoint.manifest import Manifest
from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Layout
from mics_dtensor.train.config import Mics
from mics_dtensor.upstream import local_of

pytest.importorskip("torchtitan")
import torch.distributed as dist
from torchtitan.trainer import Trainer
from train.small_run import configured, ours, train, trained_by_each

from mics_dtensor.train.trainer import MicsTrainer

SLICED = "--mics.optimizer_over_replicas=true"
MASTERS = "--mics.master_weights=sharded"


@pytest.mark.timeout(300)
def test_the_run_is_that_of_whole_states(tmp_path: Path) -> None:
    options = ("--training.steps=8", "--training.global_batch_size=8")
    expected, got = trained_by_each(ours, tmp_path, options, (*options, SLICED))
    assert len(got.losses) == 8
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)  # sums in another order


@pytest.mark.timeout(300)
def test_the_run_is_the_same_with_fp32_weights_in_the_slices_alone(tmp_path: Path) -> None:
    options = (
        "--training.steps=8",
        "--training.global_batch_size=8",
        "--training.mixed_precision_param=bfloat16",
        SLICED,
    )
    expected, got = trained_by_each(ours, tmp_path, options, (*options, MASTERS))
    assert len(got.losses) == 8
    assert got == expected


@pytest.mark.parametrize("masters", ["fp32", "sharded"])
@ranks(4, timeout_s=150)
def test_slices_that_arrive_when_they_are_waited_for_change_no_bit(
    tmp_path: Path, masters: str
) -> None:
    """Neither losses, validation, nor checkpoints, weights alone at the end; replicas checked."""
    options = (
        SLICED,
        f"--mics.master_weights={masters}",
        "--training.mixed_precision_param=bfloat16",
        "--training.global_batch_size=8",
        "--training.steps=5",
        "--validation.enable=true",
        "--validation.freq=2",
        "--validation.steps=2",
        "--validation.seq_len=32",
        "--validation.local_batch_size=1",
        "--checkpoint.enable=true",
        "--checkpoint.interval=3",
        "--checkpoint.async_mode=async",
    )
    plain, late = tmp_path / "plain", tmp_path / "late"
    for folder in (plain, late):
        folder.mkdir(exist_ok=True)
    expected = train(ours, plain, *options)
    with pytest.MonkeyPatch.context() as patch:
        hold_back(patch)
        assert train(travelling, late, *options, "--mics.overlap_update=true") == expected
    assert len(expected.losses) == 5
    assert losses_in(late / "validation.jsonl") == losses_in(plain / "validation.jsonl")
    for step in ("step-3", "step-5"):
        its, theirs = (whole_files(folder / "checkpoint" / step) for folder in (late, plain))
        assert its
        assert its == theirs, step


def travelling(config: Trainer.Config, layout: Layout) -> MicsTrainer:
    """Ours, whose every step ends while slices of the other replicas are not there yet."""
    trainer = ours(config, layout, Mics(check_replicas_every=2, overlap_update=True))
    assert str(trainer.explanation).endswith("; updated slices travel beside the next forward")
    step = trainer.optimizers.step

    def stepped() -> None:
        step()
        shards = [local_of(p.detach()) for part in trainer.model_parts for p in part.parameters()]
        assert any(shard.isnan().any() for shard in shards)

    trainer.optimizers.step = stepped
    return trainer


def losses_in(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def whole_files(folder: Path) -> dict[str, str]:
    """By name, the hash of every file that holds tensors."""
    files = Manifest.read(folder).files
    return {its.name: its.digest for its in files if its.name.endswith(".distcp")}


@pytest.mark.parametrize("masters", ["fp32", "sharded"])
@ranks(4, timeout_s=110)
def test_a_resumed_run_goes_on_alike(tmp_path: Path, masters: str) -> None:
    options = (
        SLICED,
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
    sliced = (SLICED, "--training.global_batch_size=4")
    with pytest.raises(ConfigError, match="would be ignored"):
        configured(tmp_path, *sliced, "--optimizer.implementation=fused_opt_states_bf16")
    with pytest.raises(ConfigError, match="DistMuon looks at more than one element"):
        configured(tmp_path, *sliced, "--optimizer.name=DistMuon")


# torchtitan's scheduler asks torch's for its rate in a way that torch warns of.
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("more", [(), (SLICED,)], ids=["whole", "sliced"])
@ranks(4, timeout_s=150)
def test_patterns_see_names_without_wrappers_and_a_stage_may_have_none(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    groups = r"[{ pattern = 'layers\.\d+\.attention\.', weight_decay = 0.25 },"
    groups += " { pattern = 'tok_embeddings', weight_decay = 0.5 }]"
    options = (
        f"--optimizer.param_groups={groups}",
        "--optimizer.weight_decay=0",
        "--model.n_layers=4",
        "--activation_checkpoint.mode=selective",  # every second block has a wrapper
        "--parallelism.pipeline_parallel_degree=2",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
        "--training.steps=1",
        "--mics.partition_size=1",
        *more,
    )
    trainer = ours(*configured(tmp_path, *options))
    decay = {
        name: group["weight_decay"]
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    trainer.train()
    trainer.close()
    everyones: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, decay)
    found = {name: its for each in everyones for name, its in each.items()}
    assert len({name.split(".")[1] for name in found if name.startswith("layers.")}) == 4
    for name, its in found.items():
        expected = 0.25 if ".attention." in name else 0.5 if "tok_embeddings" in name else 0
        assert its == expected, name

"""Law of `mics explain`: what the program refuses is not counted, but refused in its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.degrees import resolve
from mics_dtensor.train.load import load

LOCAL = ("--mics.node_local_backward", "--parallelism.tensor_parallel_degree=2")
SLICED = (
    "--checkpoint.enable",
    "--mics.optimizer_over_replicas",
    "--mics.checkpoint_placement=partition_group",
)


def written(folder: Path, *, partition_size: int) -> str:
    path = folder / "run.toml"
    path.write_text(f"[mics]\npartition_size = {partition_size}\n")
    return str(path)


def started(file: str, *arguments: str) -> None:
    """As by the program on 2 nodes of 4 ranks, before it makes anything."""
    run = load(["--config-file", file, *arguments])
    resolve(run, world_size=8, local_world_size=4)


@pytest.mark.parametrize(
    ("arguments", "partition_size", "words", "works"),
    [
        (LOCAL, 4, "node_local_backward = true needs plain parameters", LOCAL[:1]),
        (LOCAL, 4, "node_local_backward = true needs plain parameters", LOCAL[1:]),
        (SLICED, 2, 'checkpoint_placement = "partition_group" wants a whole copy', SLICED[:2]),
        (SLICED, 2, 'checkpoint_placement = "partition_group" wants a whole copy', SLICED[1:]),
        (SLICED, 2, "cuts states over 4 replicas", (SLICED[0], SLICED[2])),
        (SLICED, 2, 'write "spread"', (*SLICED, "--checkpoint.load_only")),
    ],
)
def test_keys_that_cannot_be_together_on_a_layout(
    tmp_path: Path,
    arguments: tuple[str, ...],
    partition_size: int,
    words: str,
    works: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = written(tmp_path, partition_size=partition_size)
    with pytest.raises(ConfigError) as refused:
        started(file, *arguments)
    assert words in str(refused.value)
    world = ("--world-size=8", "--ranks-per-node=4")
    assert main(["explain", file, *world, *arguments]) == 2
    assert capsys.readouterr().err == f"mics explain: {refused.value}\n"
    started(file, *works)
    assert main(["explain", file, *world, *works]) == 0


def test_they_can_be_together_where_groups_do_not_cross_nodes_or_do_not_meet(
    tmp_path: Path,
) -> None:
    started(written(tmp_path, partition_size=2), *LOCAL)
    started(written(tmp_path, partition_size=8), *SLICED)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("optimizers", "did you mean optimizer? choose"), ("model", "choose"), ("x", "choose")],
)
def test_what_no_checkpoint_can_do_without_is_refused_before_there_is_one(
    tmp_path: Path, name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, partition_size=4)
    given = f"--checkpoint.exclude_from_loading=dataloader,{name}"
    with pytest.raises(ConfigError) as refused:
        started(file, given)
    assert f'exclude_from_loading holds "{name}"; {hint} from' in str(refused.value)
    assert main(["explain", file, given]) == 2
    assert capsys.readouterr().err == f"mics explain: {refused.value}\n"
    started(file, "--checkpoint.exclude_from_loading=optimizer,lr_scheduler,dataloader,train_state")


def test_a_module_without_a_registry_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judged by its text, since what it imports need not be on this machine."""
    package = tmp_path / "its_own"
    package.mkdir()
    (package / "bare.py").write_text("import no_such_module\n")
    (package / "model.py").write_text("import no_such_module\ndef model_registry(flavor): ...\n")
    (package / "passed_on.py").write_text("from no_such_module import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = written(tmp_path, partition_size=4)
    for name in ("os.path", "json.decoder", "its_own.bare"):
        assert main(["explain", file, f"--model.name={name}"]) == 2
        said = f'[model] name = "{name}": the module has no model_registry(flavor, ...)'
        assert said in capsys.readouterr().err
    for name in ("its_own.model", "its_own.passed_on", "its_own.elsewhere", "not_here.model"):
        assert main(["explain", file, f"--model.name={name}"]) == 0

"""Law of the schedule: a rate that leaves what the file asks for is refused, and no other."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.load import load

STEPS = 14


def accepted(folder: Path, *lines: str) -> bool:
    path = folder / "run.toml"
    text = "\n".join(["[lr_scheduler]", *lines])
    path.write_text(f"[training]\nsteps = {STEPS}\n{text}\n")
    try:
        load(["--config-file", str(path)])
    except ConfigError as error:
        return "ends before training.steps = 14" not in str(error)
    return True


def goes_wrong(**written: object) -> bool:
    """Whether torchtitan's own formula leaves [floor, 1], climbs after the warm-up, or stops."""
    scheduler = pytest.importorskip("torchtitan.components.optimizer.lr_scheduler")
    torch = pytest.importorskip("torch")
    config = scheduler.LRSchedulersContainer.Config(**written)
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]
    try:
        (made,) = config.build(optimizers=optimizers, training_steps=STEPS).schedulers
        # Also the one that is reckoned after the last step.
        rates = [made.lr_lambdas[0](step) for step in range(STEPS + 1)]
    except AssertionError:
        return True
    after = rates[config.warmup_steps :]
    climbs = any(later > before + 1e-9 for before, later in pairwise(after))
    return climbs or min(after, default=1) < config.min_lr_factor - 1e-9


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("decay_ratio", [None, 0.0, 0.01, 0.3, 1.0])
def test_what_is_refused_is_what_goes_wrong(
    tmp_path: Path, decay_type: str, decay_ratio: float | None
) -> None:
    kinds = set()
    for total, warmup, least in product(
        [None, 1, 5, 12, 13, 14, 15, 30], [0, 2, 5, 20], [0.0, 0.1, 1.0]
    ):
        written = {
            "decay_type": decay_type,
            "decay_ratio": decay_ratio,
            "total_steps": total,
            "warmup_steps": warmup,
            "min_lr_factor": least,
        }
        lines = [f"{name} = {value!r}" for name, value in written.items() if value is not None]
        taken = accepted(tmp_path, *lines)
        assert taken != goes_wrong(**written), written
        kinds.add(taken)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("warmup_steps = 2", "linear decay would go on after it, below min_lr_factor = 0.0"),
        ("warmup_steps = 2\ndecay_type = 'cosine'", "the cosine would climb again"),
        ("warmup_steps = 20", "torchtitan has no learning rate for the steps after it"),
        ("decay_ratio = 0.0", "torchtitan has no learning rate for the steps after it"),
    ],
)
def test_explain_says_what_would_come_of_it_and_what_would_work(
    tmp_path: Path, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[lr_scheduler]\ntotal_steps = 10\n{line}\n")
    assert main(["explain", str(path), "--training.steps", "14"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mics explain: lr_scheduler.total_steps = 10 ends before")
    assert words in said
    assert "write total_steps = 14 or more, or leave it out" in said


def test_more_steps_from_the_command_line_lengthen_a_schedule_without_a_length(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 10\n")
    assert load(["--config-file", str(path), "--training.steps", "14"]).config.training.steps == 14

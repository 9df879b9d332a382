"""Numbers without sense are refused at start: every numeric key has a bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.bounds import BOUNDS
from mics_dtensor.train.config import config_keys
from mics_dtensor.train.load import load
from mics_dtensor.train.rows import rows

ON = ("--validation.enable", "--profiling.enable_profiling", "--profiling.enable_memory_snapshot")
OFF = (
    "profiling.profiler_active",
    "profiling.memory_snapshot_freq",
    "validation.freq",
    "validation.steps",
)


def written(folder: Path, text: str = "") -> list[str]:
    path = folder / "run.toml"
    path.write_text(text)
    return ["--config-file", str(path)]


def test_every_numeric_key_has_a_bound() -> None:
    numeric = {
        key.name for key in config_keys().values() if {int, float} & {key.type, *get_args(key.type)}
    }
    inert = {name for name, row in rows().items() if row.to is None}
    assert set(BOUNDS) == numeric - inert


@pytest.mark.parametrize("name", BOUNDS)
def test_the_defaults_and_what_is_just_inside_are_taken_and_the_rest_is_not(
    tmp_path: Path, name: str
) -> None:
    bound, key = BOUNDS[name], config_keys()[name]
    assert key.default is None or bound.holds(key.default)
    is_float = float in {key.type, *get_args(key.type)}
    outside = ["nan", "-1.0", "-inf"] if is_float else [str(-(2**63) - 1), "-7"]
    if name == "debug.seed":
        outside = [str(2**64), str(-(2**63) - 1)]
    if bound.least >= 1:
        outside.append("0") if bound.also != 0 else outside.append("1")
    if is_float and bound.most < math.inf:
        outside.append("inf")
    for value in outside:
        with pytest.raises(ConfigError) as refused:
            load([*written(tmp_path), *ON, f"--{name}={value}"])
        assert str(refused.value).startswith(f"{name} = "), refused.value
        assert bound.words in str(refused.value)


@pytest.mark.parametrize(
    "argument",
    [
        "--training.max_norm=inf",
        "--optimizer.lr=0",
        "--optimizer.beta1=0",
        "--optimizer.weight_decay=0",
        "--lr_scheduler.warmup_steps=0",
        "--lr_scheduler.decay_ratio=0",
        "--lr_scheduler.decay_ratio=1",
        "--checkpoint.keep_latest_k=0",
        "--checkpoint.load_step=0",
        "--comm.trace_buf_size=0",
        "--debug.seed=-1",
        "--mics.check_replicas_every=0",
    ],
)
def test_what_means_something_is_taken(tmp_path: Path, argument: str) -> None:
    load([*written(tmp_path), argument])


@pytest.mark.parametrize("name", OFF)
def test_what_is_switched_off_is_not_looked_at(tmp_path: Path, name: str) -> None:
    load([*written(tmp_path), f"--{name}=0"])


def test_a_betas_of_one_is_refused_and_a_little_less_is_not(tmp_path: Path) -> None:
    load([*written(tmp_path), "--optimizer.beta2=0.9999999"])
    with pytest.raises(ConfigError, match="less than 1"):
        load([*written(tmp_path), "--optimizer.beta2=1"])


@pytest.mark.parametrize("given", ["lr = -1.0", "betas = [0.9, 1.5]", "weight_decay = nan"])
def test_groups_of_parameters_are_looked_at_too(tmp_path: Path, given: str) -> None:
    text = f"[[optimizer.param_groups]]\npattern = 'norm'\n{given}\n"
    with pytest.raises(ConfigError, match=f"{given.partition(' ')[0]} in optimizer.param_groups"):
        load(written(tmp_path, text))


def test_a_cycle_of_profiling_holds_its_warm_up(tmp_path: Path) -> None:
    arguments = [*written(tmp_path), "--profiling.profile_freq=2"]
    load(arguments)
    with pytest.raises(ConfigError, match="write profile_freq = 4 or more"):
        load([*arguments, "--profiling.enable_profiling"])
    load([*written(tmp_path), "--profiling.enable_profiling", "--profiling.profile_freq=4"])


def test_explain_refuses_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", written(tmp_path)[1], "--optimizer.lr=-1.0"]) == 2
    assert "optimizer.lr = -1.0; it must be 0 or more" in capsys.readouterr().err

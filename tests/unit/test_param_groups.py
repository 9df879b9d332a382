"""Laws of optimizer.param_groups: what a table says is done, or refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from mics_dtensor.cli import main
from mics_dtensor.errors import ConfigError
from mics_dtensor.train.load import load
from mics_dtensor.train.param_groups import KEYS, first_matches, options_of, refuse_idle
from mics_dtensor.train.tables_job import Optimizer

NORM = 'pattern = "norm"'
ALL = ("lr", "eps", "weight_decay", "betas")


def given(folder: Path, table: str) -> list[str]:
    path = folder / "run.toml"
    path.write_text("[mics]\npartition_size = 4\n")
    return [str(path), f"--optimizer.param_groups=[{{ {table} }}]"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            'patterns = "a"',
            'unknown key patterns in optimizer.param_groups { patterns = "a" }; did you',
        ),
        (f"{NORM}, lrr = 1.0", "did you mean lr?"),
        (f"{NORM}, weight_deacy = 1.0", "did you mean weight_decay?"),
        (f"{NORM}, zzz = 1.0", f"; a table takes {', '.join(KEYS)}"),
        ("lr = 1.0", "lacks a pattern; write pattern"),
        ("pattern = 3", "pattern = 3 in optimizer.param_groups { pattern = 3 }; it takes a string"),
        ('pattern = "("', "is no regular expression (missing ), unterminated subpattern at"),
        (f'{NORM}, beta2 = "x"', "it takes a number"),
        (f"{NORM}, lr = true", "it takes a number"),
        (f"{NORM}, lr = [1.0]", "it takes a number"),
        (f"{NORM}, amsgrad = 1", "it takes true or false"),
        (f"{NORM}, betas = 0.9", "it takes a list of numbers"),
        (f"{NORM}, betas = [0.9]", "it takes two numbers"),
        (f"{NORM}, betas = [0.9, 0.9], beta1 = 0.9", "says a beta twice"),
        (f"{NORM}, beta1 = 1.5", "beta1 in optimizer.param_groups = 1.5; it must be 0 or more"),
        (f'{NORM}, optimizer_name = "SGD"', "choose from ['Adam', 'AdamW']"),
    ],
)
def test_what_a_table_cannot_say_is_refused_by_both(
    tmp_path: Path, table: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given(tmp_path, table)
    with pytest.raises(ConfigError) as refused:
        load(["--config-file", *arguments])
    assert words in str(refused.value)
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"mics explain: {refused.value}\n")


def test_every_key_is_taken_and_reaches_the_optimizer(tmp_path: Path) -> None:
    its, own = Optimizer(), {"lr": 1.0, "eps": 0.5, "weight_decay": 0.25, "amsgrad": True}
    own["maximize"] = True
    for name, value in own.items():
        load(["--config-file", *given(tmp_path, f"{NORM}, {name} = {str(value).lower()}")])
        assert options_of({"pattern": "norm", name: value}, its)[name] == value
    assert options_of({"beta1": 0.5}, its)["betas"] == (0.5, its.beta2)
    assert options_of({"beta2": 0.5}, its)["betas"] == (its.beta1, 0.5)
    assert options_of({"betas": [0.5, 0.25]}, its)["betas"] == (0.5, 0.25)
    rest = {"lr": its.lr, "eps": its.eps, "weight_decay": its.weight_decay}
    assert options_of({}, its) == {**rest, "betas": (its.beta1, its.beta2)}
    assert {*own, *ALL, "beta1", "beta2", "pattern", "optimizer_name"} == set(KEYS)


def test_a_parameter_belongs_to_the_first_table_that_finds_it() -> None:
    names = ["layers.0.norm.weight", "norm.weight", "lm_head.weight"]
    assert first_matches(["norm", "head", "^norm"], names) == {0, 1}
    refuse_idle(["^norm", "norm", "head"], names, "a model")
    with pytest.raises(ConfigError, match=r'"\^norm" .* an earlier table has taken; put it before'):
        refuse_idle(["norm", "^norm"], names, "a model")
    with pytest.raises(ConfigError, match=r'"bias" .* finds no parameter of a model; write a part'):
        refuse_idle(["bias"], names, "a model")

"""The tables of optimizer.param_groups: what they may hold, and which parameters are whose. Pure.

A parameter belongs to the first table whose pattern is found in its name, else to all the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.bounds import OF_A_GROUP
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import key, keys
from mics_dtensor.train.known import OPTIMIZERS
from mics_dtensor.train.tables_job import Optimizer
from mics_dtensor.train.values import described, fits, shown


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """One table. What is not given is as in [optimizer]."""

    pattern: str = key(None, "regular expression that is sought in the names of parameters")
    optimizer_name: str = key(None, "as name in [optimizer]")
    lr: float = key(None, "learning rate")
    beta1: float = key(None, "decay of the first moment")
    beta2: float = key(None, "decay of the second moment")
    betas: tuple[float, ...] = key(None, "both at once, in place of beta1 and beta2")
    eps: float = key(None, "added to the denominator")
    weight_decay: float = key(None, "weight decay")
    amsgrad: bool = key(None, "as torch's Adam has it")
    maximize: bool = key(None, "as torch's Adam has it")


KEYS = {each.name: each for each in keys(ParamGroup)}


def refuse_groups(config: RunConfig) -> None:
    """Raises ConfigError for a table that torchtitan's optimizers would not read as it is meant."""
    for group in config.optimizer.param_groups:
        for name, value in group.items():
            if name not in KEYS:
                raise ConfigError(f"unknown key {name} in {_said(group)}{_nearest(name)}")
            if not fits(KEYS[name].type, value):
                takes = described(KEYS[name].type)
                raise ConfigError(f"{name} = {shown(value)} in {_said(group)}; it takes {takes}")
            if name in OF_A_GROUP:
                for each in value if isinstance(value, list | tuple) else (value,):
                    OF_A_GROUP[name].check(f"{name} in optimizer.param_groups", each)
        _refuse_pattern(group)
        _refuse_betas(group)
        chosen = group.get("optimizer_name", OPTIMIZERS[0])
        if chosen not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer_name = {shown(chosen)} in {_said(group)}; choose from "
                f"{list(OPTIMIZERS)}"
            )


def _refuse_pattern(group: Mapping[str, Any]) -> None:
    if "pattern" not in group:
        raise ConfigError(
            f'{_said(group)} lacks a pattern; write pattern = "norm" for the parameters with norm '
            "in their names"
        )
    try:
        re.compile(group["pattern"])
    except re.error as error:
        raise ConfigError(
            f"pattern = {shown(group['pattern'])} in {_said(group)} is no regular expression "
            f"({error}); put a backslash before what stands for itself"
        ) from None


def _refuse_betas(group: Mapping[str, Any]) -> None:
    betas = group.get("betas")
    if betas is None:
        return
    if len(betas) != 2:
        raise ConfigError(f"betas = {shown(betas)} in {_said(group)}; it takes two numbers")
    if "beta1" in group or "beta2" in group:
        raise ConfigError(f"{_said(group)} says a beta twice; write beta1 and beta2, or betas")


def _nearest(name: str) -> str:
    if near := difflib.get_close_matches(name, KEYS, n=1):
        return f"; did you mean {near[0]}?"
    return f"; a table takes {', '.join(KEYS)}"


def _said(group: Mapping[str, Any]) -> str:
    return f"optimizer.param_groups {shown(dict(group))}"


def options_of(group: Mapping[str, Any], its: Optimizer) -> dict[str, Any]:
    """What torch's optimizers call the options of a table; of no table (empty), those of all."""
    given = {name: group.get(name, getattr(its, name)) for name in ("lr", "eps", "weight_decay")}
    betas = group.get("betas") or [group.get(name, getattr(its, name)) for name in BETAS]
    more = {name: group[name] for name in ("amsgrad", "maximize") if name in group}
    return {**given, "betas": tuple(betas), **more}


BETAS = ("beta1", "beta2")


def first_matches(patterns: Sequence[str], names: Iterable[str]) -> set[int]:
    """The numbers of the patterns that a parameter belongs to."""
    sought = [re.compile(each) for each in patterns]
    firsts = (next((i for i, its in enumerate(sought) if its.search(n)), -1) for n in names)
    return set(firsts) - {-1}


def refuse_idle(patterns: Sequence[str], names: Sequence[str], model: str) -> None:
    """Raises ConfigError for a pattern that no parameter of the model belongs to."""
    used = first_matches(patterns, names)
    for number, pattern in enumerate(patterns):
        if number in used:
            continue
        said = f"pattern = {shown(pattern)} in optimizer.param_groups"
        if first_matches([pattern], names):
            raise ConfigError(
                f"{said} finds only parameters that an earlier table has taken; put it before that "
                "one, or delete it"
            )
        kinds = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in names)
        raise ConfigError(
            f"{said} finds no parameter of {model}; write a part of {', '.join(kinds)}"
        )

"""Whether a checkpoint is this model's: names and shapes are compared before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from mics_dtensor.checkpoint.outline import EXTRA
from mics_dtensor.errors import CheckpointError
from mics_dtensor.world import gathered, rank_here

logger = logging.getLogger(__name__)

NUM_NAMED = 10
NOT_OF_THE_MODEL = ("optimizer", "extra", "lr_scheduler", "dataloader", "train_state")
SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
Shape = tuple[int, ...] | None  # None: no tensor


class MatchedPlanner(DefaultLoadPlanner):
    """DCP's planner. Raises CheckpointError, with the first ten names, for another model's values.

    Options of the optimizer that another version of torch has added keep their value, as do masters
    of weights where the checkpoint has none; both are logged. Of what only the checkpoint has, it
    minds parameters and states of the optimizer.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(allow_partial_load=True)
        self._path = path

    def create_local_plan(self) -> LoadPlan:
        """On every rank; those of a stage of a pipeline have its names alone. Collective."""
        saved = shapes_of(cast("Metadata", self.metadata))
        wanted = {name: shape_of(value) for name, value in self.state_dict.items()}
        asked = [f"{EXTRA}.{name}" for name in self.original_state_dict.get(EXTRA, ())]
        by_any = wanted_by_any(saved, wanted)
        if found := differing(saved, wanted, elsewhere=by_any, asked=asked):
            whose, way = whose_else(name for names in found.values() for name in names)
            raise CheckpointError(f"{self._path} is of {whose}: {in_words(found)}{way}")
        kept = [name for name in wanted if name not in saved]
        if kept and rank_here() == 0:
            logger.warning("%s does not hold %s: they stay as they are", self._path, named(kept))
        return super().create_local_plan()


def shapes_of(metadata: Metadata) -> dict[str, Shape]:
    """Of every value of a checkpoint."""
    return {
        name: tuple(its.size) if isinstance(its, TensorStorageMetadata) else None
        for name, its in metadata.state_dict_metadata.items()
    }


def shape_of(value: Any) -> Shape:
    """Of a tensor, of the whole one where it is distributed."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def wanted_by_any(saved: Iterable[str], wanted: Collection[str]) -> set[str]:
    """Those of the saved names, the same on all ranks, that some rank wants. Collective.

    One message of one bit a name, since a world may be large.
    """
    names, bits = sorted(saved), 0
    for its in gathered(int("0" + "".join("01"[name in wanted] for name in names), 2)):
        bits |= its
    said = f"{bits:0{len(names)}b}"
    return {name for name, bit in zip(names, said, strict=False) if bit == "1"}


def difference(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """What keeps the saved values from being the wanted ones; "" where nothing does. Pure."""
    return in_words(differing(saved, wanted))


def in_words(found: Mapping[str, list[str]]) -> str:
    """Of what `differing` has found, the first ten names of each."""
    return "; ".join(f"{what} {named(names)}" for what, names in found.items())


def whose_else(names: Iterable[str]) -> tuple[str, str]:
    """Whose a checkpoint is that differs in these names, and what of it can be loaded."""
    kinds = {kind_of(name) for name in names}
    if "" in kinds:
        return "another model", ""
    if "optimizer" in kinds:
        return "another optimizer, or of one that trains other parameters", (
            "; its weights can be loaded alone: Checkpoints without an optimizer, or in the "
            "program checkpoint.initial_load_path with initial_load_model_only = true"
        )
    return "a run with other things in `extra`", (
        "; load it with those that it has, each of which, for a checkpoint of an earlier version, "
        "must hold entries of the same names already; give the others to a new Checkpoints"
    )


def differing(
    saved: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    *,
    elsewhere: Collection[str] = (),
    asked: Iterable[str] = (),
) -> dict[str, list[str]]:
    """By what is wrong with them, the names of values that keep one from being the other. Pure.

    `elsewhere`: names that other ranks want. `asked`: kinds that are wanted even where no name of
    them is.
    """
    minded = {kind_of(name) for name in wanted} | set(asked)  # the others are not asked for
    others = () if has_states(saved) else other_options(saved, wanted)
    lacking = [name for name in wanted if name not in saved and not may_be_lacking(name)]
    extra = [
        name
        for name in saved
        if name not in wanted
        and name not in elsewhere
        and kind_of(name) in minded
        and not may_be_extra(name)
    ]
    lacking += [name for name in wanted if name in others]
    extra += [name for name in saved if name in others]
    reshaped = [
        f"{name} {list(saved[name] or ())}, not {list(shape or ())}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    said = {
        "it lacks": lacking,
        "it also has": extra,
        "of another shape are": reshaped,
    }
    return {what: names for what, names in said.items() if names}


def has_states(saved: Iterable[str]) -> bool:
    """Of an optimizer, which tell of what kind it was."""
    return any(name.startswith("optimizer.state.") for name in saved)


def other_options(saved: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """Names of options that one side alone has, where both have such: optimizers of two kinds."""
    mine, theirs = (
        {name for name in names if name.startswith("optimizer.param_groups.")}
        for names in (wanted, saved)
    )
    lacking, more = differing_options(map(option_of, mine), map(option_of, theirs))
    return {name for name in mine ^ theirs if option_of(name) in lacking | more}


def differing_options(mine: Iterable[str], theirs: Iterable[str]) -> tuple[set[str], set[str]]:
    """Options that either side alone has, where both have some, and else none. Pure.

    A version of torch only adds options, and a scheduler's may come and go.
    """
    here, there = set(mine), set(theirs)
    lacking, more = here - there - SCHEDULED, there - here - SCHEDULED
    return (lacking, more) if lacking and more else (set(), set())


def option_of(name: str) -> str:
    """lr, of optimizer.param_groups.layers.0.weight.lr."""
    return name.rpartition(".")[2]


def kind_of(name: str) -> str:
    """What a value belongs to: "" is the model, "optimizer", "extra.ema", ..."""
    first, _, rest = name.partition(".")
    if first not in NOT_OF_THE_MODEL:
        return ""
    return f"{first}.{rest.partition('.')[0]}" if first == "extra" else first


def may_be_lacking(name: str) -> bool:
    """Options of the optimizer, and masters, which are made of the weights."""
    return name.startswith("optimizer.param_groups.") or is_master(name)


def may_be_extra(name: str) -> bool:
    """The same, and what the program adds of its own."""
    return may_be_lacking(name) or kind_of(name) in ("lr_scheduler", "dataloader", "train_state")


def is_master(name: str) -> bool:
    """An fp32 copy of weights that ReplicaShardedOptimizer trains."""
    return name.startswith("optimizer.state.") and name.endswith(".master")


def named(names: Iterable[str]) -> str:
    """The first ten, and how many more."""
    every = sorted(names)
    more = f" and {len(every) - NUM_NAMED} more" if len(every) > NUM_NAMED else ""
    return ", ".join(every[:NUM_NAMED]) + more

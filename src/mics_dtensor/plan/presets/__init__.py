"""Shapes of torchtitan's models, as data: FSDP units by flavor. Needs neither torch nor torchtitan.

A test builds every flavor with torchtitan and compares.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from math import prod

from mics_dtensor.errors import PlanError

TABLE, HEAD = "tok_embeddings", "lm_head"

MODELS = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")


@dataclass(frozen=True)
class UnitShapes:
    """`count` like FSDP units, e.g. all blocks; names and shapes of the parameters of one."""

    name: str
    count: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        """Elements of one unit."""
        return sum(prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True)
class Preset:
    """A flavor of a model: its FSDP units in forward order."""

    model: str
    flavor: str
    units: tuple[UnitShapes, ...]
    num_heads: int | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model; tied weights once."""
        return sum(unit.count * unit.numel for unit in self.units)

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one table."""
        return any(TABLE in unit.name and HEAD in unit.name for unit in self.units)

    def with_layers(self, num_layers: int) -> Preset:
        """The same model with another number of blocks, all alike (as [model] n_layers)."""
        if not any(unit.name == "layers.*" for unit in self.units):
            raise PlanError(
                f"the blocks of {self.model} {self.flavor} are not all alike; their number is the "
                "flavor's"
            )
        changed = (
            replace(unit, count=num_layers) if unit.name == "layers.*" else unit
            for unit in self.units
        )
        units = tuple(changed)
        if units == self.units:
            return self
        return replace(self, flavor=f"{self.flavor} of {num_layers} blocks", units=units)


def preset(model: str, flavor: str) -> Preset:
    """The shapes of a flavor; PlanError for one that is not here, naming those that are."""
    if model not in MODELS:
        raise PlanError(f"no shapes of {model} are known; there are those of {', '.join(MODELS)}")
    read = tomllib.loads(
        (resources.files("mics_dtensor.plan.presets") / f"{model}.toml").read_text("utf-8")
    )
    if flavor not in read:
        raise PlanError(f"{model} has no flavor {flavor}; it has {', '.join(read)}")
    units = tuple(
        UnitShapes(
            name=unit["name"],
            count=unit["count"],
            parameters=tuple((name, tuple(shape)) for name, shape in unit["parameters"].items()),
        )
        for unit in read[flavor]["units"]
    )
    heads = read[flavor].get("num_heads")
    return Preset(model=model, flavor=flavor, units=units, num_heads=heads)


def flavors(model: str) -> tuple[str, ...]:
    """The flavors of a model."""
    file = resources.files("mics_dtensor.plan.presets") / f"{model}.toml"
    return tuple(tomllib.loads(file.read_text("utf-8")))

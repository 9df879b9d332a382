"""The shapes in plan/presets are those of torchtitan's models, unit by unit."""

import importlib

import pytest

pytest.importorskip("torchtitan")

import torch

from mics_dtensor.plan.presets import MODELS, Preset, flavors, preset

EVERY = [(model, flavor) for model in MODELS for flavor in flavors(model)]


def in_full(shapes: Preset) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by its full name."""
    found: dict[str, tuple[int, ...]] = {}
    first = 0
    for unit in shapes.units:
        if not unit.name.startswith("layers."):
            found |= dict(unit.parameters)
            continue
        for block in range(first, first + unit.count):
            found |= {f"layers.{block}.{name}": shape for name, shape in unit.parameters}
        first += unit.count
    return found


@pytest.mark.parametrize(("model", "flavor"), EVERY)
def test_a_preset_is_the_model(model: str, flavor: str) -> None:
    spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(flavor)
    with torch.device("meta"):
        built = spec.model.build()
    if spec.model.enable_weight_tying:
        built.tok_embeddings.weight = built.lm_head.weight
    parameters = {name: tuple(p.shape) for name, p in built.named_parameters()}
    shapes = preset(model, flavor)
    assert in_full(shapes) == parameters
    units = [unit.name for unit in shapes.units if not unit.name.startswith("layers.")]
    tied = ["tok_embeddings, norm, lm_head"]
    assert units == (
        tied if spec.model.enable_weight_tying else ["tok_embeddings", "norm, lm_head"]
    )


@pytest.mark.parametrize("model", MODELS)
def test_no_flavor_is_missing(model: str) -> None:
    module = importlib.import_module(f"torchtitan.models.{model}")
    table = next(value for name, value in vars(module).items() if name.endswith("_configs"))
    assert set(flavors(model)) == set(table)

"""A model, or its parts: what every call takes first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mics_dtensor.errors import ConfigError


def parts_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """The parts; a model alone is one. Raises ConfigError for what is no module."""
    given: Any = model
    is_one = isinstance(given, nn.Module | torch.Tensor) or not isinstance(given, Iterable)
    parts: list[Any] = [given] if is_one else list(given)
    if wrong := [type(its).__name__ for its in parts if not isinstance(its, nn.Module)]:
        raise ConfigError(
            f"a {wrong[0]} is no model: give the model, or its parts, whose parameters "
            "are found by themselves"
        )
    return parts

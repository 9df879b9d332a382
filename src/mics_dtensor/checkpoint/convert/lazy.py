"""A tensor that is made when it is needed, so that a model larger than memory can pass through."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mics_dtensor.errors import CheckpointError


@dataclass(frozen=True)
class LazyTensor:
    """Shape and dtype at once, values (on the CPU) by `read`, which holds none of them back."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.shape.numel() * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same in another dtype, where it is a floating-point tensor."""
        if not self.dtype.is_floating_point or dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))


LazyTensors = Mapping[str, LazyTensor]
Translation = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Renames and permutes a whole state dict: torchtitan's from_hf and to_hf."""


def translated(tensors: LazyTensors, translation: Translation) -> dict[str, LazyTensor]:
    """What `translation` makes of `tensors`, still lazily: one layer is in memory at a time.

    A translation sees all names every time, with values for one layer (the first number in a name)
    and meta tensors for the rest. Raises CheckpointError where it mixes layers.
    """
    layers = _Layers(tensors, translation)
    made = translation({name: tensor.meta() for name, tensor in tensors.items()})
    return {
        name: LazyTensor(tensor.shape, tensor.dtype, lambda name=name: layers.read(name))  # type: ignore[misc]
        for name, tensor in made.items()
    }


class _Layers:
    """The translated tensors of the layer that was asked for last."""

    def __init__(self, tensors: LazyTensors, translation: Translation) -> None:
        self._tensors, self._translation = tensors, translation
        self._layer: str | None = None
        self._held: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        layer = _layer_of(name)
        if layer != self._layer or not self._held:
            self._held = {}  # the last layer is let go before the next is read
            self._held = self._translation(
                {
                    key: tensor.read() if _layer_of(key) == layer else tensor.meta()
                    for key, tensor in self._tensors.items()
                }
            )
            self._layer = layer
        found = self._held[name]
        if found.is_meta:
            raise CheckpointError(
                f"{name} is made of tensors of several layers, which cannot be converted layer by "
                "layer"
            )
        return found.contiguous()


def _layer_of(name: str) -> str:
    found = re.search(r"\d+", name)
    return found.group() if found else ""

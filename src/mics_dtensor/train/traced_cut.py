"""torchtitan's tensor parallel for a model that is traced: its own plan, on a mesh of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.utils import set_spmd_backend

BACKEND = "partial_dtensor"
"""The layout that every torch with FSDP2 can run; what it keeps is what the trace tells."""


class CutDims:
    """What Module.parallelize asks of torchtitan's ParallelDims, where the axis tp is all there is.

    FSDP's axes stay out of it under `partial_dtensor`. torchtitan's own builds every mesh of a run,
    on the devices of this machine; a trace has one, on CPU.
    """

    spmd_backend = BACKEND

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_optional_mesh(self, axis: str) -> DeviceMesh | None:
        """The mesh of one axis."""
        return self._mesh if axis == "tp" else None

    def resolve_mesh(self, axes: Iterable[str]) -> DeviceMesh | None:
        """The mesh of those axes that there are."""
        return self._mesh if "tp" in {str(axis) for axis in axes} else None

    def resolve_shared_mesh(self, layouts: Iterable[Any]) -> DeviceMesh | None:
        """The mesh of layouts, which have the same axes."""
        first = next((layout for layout in layouts if layout is not None), None)
        return None if first is None else self.resolve_mesh(first.axes())


def plan_cut(spec: Any, degree: int) -> None:
    """Fill the layouts of a ModelSpec as torchtitan's trainer does, in place, before its build."""
    set_spmd_backend(BACKEND)
    parallelism = ParallelismConfig(tensor_parallel_degree=degree, spmd_backend=BACKEND)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))


def cut(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallel over the axis tp of `mesh`, in place; before checkpointing and FSDP2."""
    model.parallelize(CutDims(mesh["tp"]))


def loss_of(model: nn.Module, degree: int) -> Callable[..., torch.Tensor]:
    """The loss of tokens and their places, over slices of the vocabulary under tensor parallel."""

    def plain(tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, place).flatten(0, 1).float()
        return functional.cross_entropy(logits, tokens.flatten())

    def in_slices(tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = cross_entropy_loss(model(tokens, place), tokens)
        return loss

    return plain if degree == 1 else in_slices

"""The model of a run by its names: what its checkpoints hold, and what Hugging Face calls that.

Everything happens on the meta device, through torchtitan's state-dict adapters; no rank, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mics_dtensor.checkpoint.matching import difference, named
from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.load import IN_HF
from mics_dtensor.train.model import model_spec

if TYPE_CHECKING:
    from torchtitan.components.checkpoint import CheckpointManager

Tensors = dict[str, torch.Tensor]


def refuse_lost_weights(config: RunConfig) -> None:
    """Raise ConfigError where the run reads or writes Hugging Face's files, and its model cannot.

    torchtitan's adapters leave out what they have no name for: written, it would be missing; read,
    it would keep its random start.
    """
    written = config.checkpoint
    asked = [
        f"checkpoint.{name} = true" for name in IN_HF if written.enable and getattr(written, name)
    ]
    if not asked:
        return
    weights = RunWeights(config)
    said, out = " and ".join(asked), _WITHOUT_HF
    if not weights.has_hf_names:
        raise ConfigError(f"{said}: torchtitan has no adapter for {weights.label}; {out}")
    lost, _ = weights.not_exported()
    if lost:
        raise ConfigError(
            f"{said}: torchtitan's adapter for {weights.label} has no Hugging Face name for "
            f"{len(lost)} parameters ({', '.join(lost[:3])}, ...), which would be lost without a "
            f"word; {out}"
        )


def refuse_cut(checkpoints: CheckpointManager) -> None:
    """Raise ConfigError where an adapter cannot take the experts apart as this run has cut them.

    torchtitan would say so at the last save. `checkpoints` has the model as it is trained.
    """
    from torchtitan.components.checkpoint import MODEL

    its = checkpoints
    if not its.enable or not (its.last_save_in_hf or its.initial_load_in_hf):
        return
    try:
        its.sd_adapter.to_hf(its.states[MODEL].state_dict())
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"torchtitan's adapter for Hugging Face does not take the model as it is cut here "
            f"({error}): choose a [mics] partition_size that divides the number of its experts, or "
            f"{_WITHOUT_HF}"
        ) from error


_WITHOUT_HF = (
    "leave Hugging Face's files out (initial_load_in_hf, last_save_in_hf): of a checkpoint as the "
    "program saves it `mics convert hf` makes safetensors, with --names own in torchtitan's names"
)


class RunWeights:
    """`shapes`: of the state dict, by name. `trained`: names of the parameters of the optimizer.

    torchtitan holds some products fused in the module and split in the state dict, so the two sets
    of names differ. Raises ConfigError where the run's model is not known.
    """

    def __init__(self, config: RunConfig) -> None:
        try:
            spec = model_spec(config)
        except ImportError as error:
            raise ConfigError(
                f"the run's model is torchtitan's, which cannot be imported ({error}): "
                "pip install mics-dtensor[train]"
            ) from None
        with torch.device("meta"):
            self._model = spec.model.build()
        made = spec.state_dict_adapter
        self._adapter = None if made is None else made(spec.model, None)
        self.label = f"{spec.name} {spec.flavor}"
        self.shapes = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        self.trained = {name: tuple(its.shape) for name, its in self._model.named_parameters()}

    @property
    def has_hf_names(self) -> bool:
        """Whether torchtitan has an adapter for the model."""
        return self._adapter is not None

    def are_named(self, names: Iterable[str]) -> bool:
        """Whether `names` are more the run's own than Hugging Face's."""
        own = self.shapes.keys() & set(names)
        return len(own) > len(self._hf_names() & set(names))

    def from_hf(self, tensors: Tensors) -> Tensors:
        """Of a whole state dict in Hugging Face's names and layouts: in the run's."""
        return self._adapted("from_hf", tensors)

    def to_hf(self, tensors: Tensors) -> Tensors:
        """The way back."""
        return self._adapted("to_hf", tensors)

    def as_parameters(self, tensors: Tensors) -> Tensors:
        """Of a whole state dict in the run's names: by the parameters that the optimizer has.

        The model itself says which; it is loaded, on the meta device or with what is given.
        """
        if absent := self.shapes.keys() - tensors.keys() - self._buffers():
            raise CheckpointError(
                f"the checkpoint has no optimizer state for {named(absent)}, which {self.label} "
                "trains (frozen before?); give --weights-only to start with a fresh optimizer"
            )
        self._model.load_state_dict(tensors, strict=False, assign=True)
        return {name: its.detach() for name, its in self._model.named_parameters()}

    def not_exported(self) -> tuple[list[str], list[str]]:
        """Parameters, and buffers, that torchtitan's adapter has no Hugging Face name for."""
        there = self.from_hf(self.to_hf(self._meta()))
        lost = sorted(self.shapes.keys() - there.keys())
        buffers = self._buffers()
        return [n for n in lost if n not in buffers], [n for n in lost if n in buffers]

    def check(self, shapes: Mapping[str, Any]) -> None:
        """Raise CheckpointError where these are not the run's parameters, naming the first ten."""
        wanted = {name: shape for name, shape in self.shapes.items() if name not in self._buffers()}
        found = {name: tuple(shape) for name, shape in shapes.items()}
        found = {name: shape for name, shape in found.items() if name not in self._buffers()}
        if words := difference(found, wanted):
            raise CheckpointError(f"the checkpoint is not of {self.label}: {words}")

    def check_hf(self, shapes: Mapping[str, Any]) -> None:
        """The same in Hugging Face's names, before an adapter is asked to take them apart."""
        wanted = {name: tuple(its.shape) for name, its in self.to_hf(self._meta()).items()}
        found = {name: tuple(shape) for name, shape in shapes.items() if name in wanted}
        if words := difference(found, wanted):
            raise CheckpointError(f"the checkpoint is not of {self.label}: {words}")

    def _meta(self) -> Tensors:
        return {n: torch.empty(shape, device="meta") for n, shape in self.shapes.items()}

    def _buffers(self) -> set[str]:
        return {name for name, _ in self._model.named_buffers()}

    def _hf_names(self) -> set[str]:
        return set() if self._adapter is None else set(self.to_hf(self._meta()))

    def _adapted(self, way: str, tensors: Tensors) -> Tensors:
        if self._adapter is None:
            raise ConfigError(
                f"torchtitan has no state-dict adapter for {self.label}: its names are its own "
                "(--names own)"
            )
        try:
            return dict(getattr(self._adapter, way)(dict(tensors)))
        except KeyError as error:
            raise CheckpointError(
                f"{error.args[0]} is no tensor of {self.label} as torchtitan's adapter knows it: "
                "another model, or names with a prefix of your own"
            ) from None
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"torchtitan's adapter for {self.label} does not take this checkpoint: {error}"
            ) from None

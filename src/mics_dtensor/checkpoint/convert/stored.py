"""The weights in a checkpoint of torch.distributed.checkpoint, lazily, by one process."""

from __future__ import annotations

import pickle
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from mics_dtensor.checkpoint.convert.lazy import LazyTensor
from mics_dtensor.checkpoint.manifest import NAME, Manifest, not_a_checkpoint
from mics_dtensor.errors import CheckpointError

NOT_WEIGHTS = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state", "extra")
"""What else a checkpoint of ours, of torchtitan or of torch's recipes holds at the top."""


class _ReadsItsMetadataOnce(FileSystemReader):
    """Every tensor is a load of its own, and the description of a large checkpoint is large."""

    @cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def stored_weights(path: Path, *, verify: bool = True) -> dict[str, LazyTensor]:
    """The tensors of the model in the checkpoint at `path`, by name; without its optimizer.

    Where model and optimizer lie nested under names ("model", "app.model"), as torch's recipes have
    it, the model's are taken. With `verify` the files are first held against the manifest, which
    reads them once. Raises CheckpointError for what is no checkpoint, or no whole one.
    """
    if verify or (path / NAME).is_file():
        manifest = Manifest.read(path)
        manifest.check(path) if verify else manifest.check_sizes(path)
    elif not (path / ".metadata").is_file():
        raise CheckpointError(not_a_checkpoint(path))
    reader = _ReadsItsMetadataOnce(path)
    try:
        metadata = reader.read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise CheckpointError(f"{path / '.metadata'} cannot be read ({error})") from None
    names = _weights(metadata)
    if not names:
        raise CheckpointError(f"{path} holds no weights: {', '.join(metadata.state_dict_metadata)}")
    return {name: _lazy(reader, metadata, key) for name, key in names.items()}


def _weights(metadata: Metadata) -> dict[str, str]:
    """Name in the model: name in the checkpoint."""
    tensors = [
        name
        for name, its in metadata.state_dict_metadata.items()
        if isinstance(its, TensorStorageMetadata)
    ]
    paths = metadata.planner_data or {}
    for depth in (1, 2):  # {"model": ...}, {"app": {"model": ...}}
        nested = {
            ".".join(map(str, paths[name][depth:])): name
            for name in tensors
            if name in paths and len(paths[name]) > depth and paths[name][depth - 1] == "model"
        }
        if nested:
            return nested
    return {name: name for name in tensors if name.partition(".")[0] not in NOT_WEIGHTS}


def _lazy(reader: FileSystemReader, metadata: Metadata, key: str) -> LazyTensor:
    its = cast("TensorStorageMetadata", metadata.state_dict_metadata[key])

    def read() -> torch.Tensor:
        into = {key: torch.empty(its.size, dtype=its.properties.dtype)}
        with warnings.catch_warnings():
            # Meant so: one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(into, storage_reader=reader, no_dist=True)
        return into[key]

    return LazyTensor(its.size, its.properties.dtype, read)

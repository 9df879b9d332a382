"""A torch.distributed.checkpoint folder from lazy tensors, by one process, file by file."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mics_dtensor.checkpoint.convert.lazy import LazyTensor

FILE_BYTES = 1 << 30  # of one file, which whoever writes or loads holds in memory as a whole


def write_dcp(folder: Path, states: Mapping[str, Any], *, file_bytes: int = FILE_BYTES) -> None:
    """Writes `states`, nested, whose LazyTensors are read when their turn comes: those of one file
    are in memory at a time.

    Raises what reading or writing raised.
    """
    try:
        with warnings.catch_warnings():
            # Meant so: one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                _with_meta(states),
                storage_writer=_FilesOfALimitedSize(folder, file_bytes),
                planner=_ReadsLate(states),
                no_dist=True,
            )
    except CheckpointException as error:  # DCP's own is no Exception
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def _with_meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.meta()
    if isinstance(value, Mapping):
        return {key: _with_meta(each) for key, each in value.items()}
    return value


class _ReadsLate(DefaultSavePlanner):
    """Plans with meta tensors, and hands over the values when they are written."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        super().__init__()
        self._states = states

    def lookup_object(self, index: MetadataIndex) -> Any:
        found: Any = self._states
        for key in self.mappings[index.fqn]:
            found = found[key]
        return found.read().detach() if isinstance(found, LazyTensor) else found


class _FilesOfALimitedSize(FileSystemWriter):
    """Files as several ranks would write them, one after the other."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(folder, thread_count=1, single_file_per_rank=True)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_cut(plan.items, self._file_bytes)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _cut(items: list[WriteItem], file_bytes: int) -> list[list[WriteItem]]:
    """Consecutive items, of `file_bytes` together at most unless a single one is larger."""
    files: list[list[WriteItem]] = [[]]
    filled = 0
    for item in items:
        size = _size_bytes(item)
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


def _size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else torch.Size(data.size).numel() * data.properties.dtype.itemsize

"""Which rank writes what: one copy of everything, on all ranks or on those of one partition group.

The files are those of torch.distributed.checkpoint (DCP), hashed as they are written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from mics_dtensor.checkpoint.commit import (
    abandon,
    begin,
    commit,
    mark,
    partial_of,
    retire,
    taken_away,
)
from mics_dtensor.checkpoint.digest import Digest
from mics_dtensor.checkpoint.manifest import File, Manifest
from mics_dtensor.checkpoint.outline import OUTLINES, merged
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.errors import CheckpointError
from mics_dtensor.upstream import storage_info

Placement = Literal["spread", "partition_group"]
OPTIMIZER = "optimizer"  # under this name a checkpoint holds the states of the optimizer
ALIGNMENT = 64  # of a value in a file, as of a storage in what torch.save writes
LARGE_BYTES = 1 << 20  # a write of this size is hashed by another thread meanwhile


class PlacedPlanner(DefaultSavePlanner):
    """What is held by several ranks is written by one.

    "spread": by the one that has least to write, so that all write, each about 1/world_size.
    "partition_group": by the lowest, which lies in the first partition group: its ranks write a
    whole copy, and where they are one node's, so does its disk hold one.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(dedup_save_to_lowest_rank=placement == "partition_group")
        self._placement = placement

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """DCP's; the outlines go into `.metadata` and not among the values."""
        values = dict(state_dict)
        self._outlines: bytes | None = values.pop(OUTLINES, None)
        super().set_up_planner(values, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """DCP's, and the outlines of this rank."""
        plan = super().create_local_plan()
        if self._outlines is not None:
            plan = replace(plan, planner_data={**plan.planner_data, OUTLINES: self._outlines})
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's, and the outlines of all ranks.

        Raises CheckpointError where one partition group does not hold everything, or ranks differ.
        """
        outlines = merged([plan.planner_data.get(OUTLINES) for plan in all_plans])
        plans, metadata = super().create_global_plan(all_plans)
        if outlines is not None:
            metadata = replace(metadata, planner_data={**metadata.planner_data, OUTLINES: outlines})
        if self._placement == "partition_group":
            optimizer = f"{OPTIMIZER}."
            group = {
                rank
                for rank, plan in enumerate(plans)
                for item in plan.items
                if item.tensor_data is not None and not item.index.fqn.startswith(optimizer)
            }
            for rank, plan in enumerate(plans):
                if plan.items and rank not in group:
                    raise CheckpointError(
                        f'placement "partition_group": {plan.items[0].index.fqn} is held by rank '
                        f"{rank}, outside of the first partition group: optimizer states over the "
                        'replicas and values of single ranks need "spread", on a disk that all '
                        "nodes share"
                    )
        return plans, metadata


@dataclass(frozen=True)
class FileWritten(WriteResult):
    """A WriteResult that also says which file its rank has written; on the first of them."""

    file: File | None = None


class Writer(FileSystemWriter):
    """Writes the checkpoint `path` and completes it; `about` is its manifest, without files.

    On the coordinator, once every rank has written: the manifest, the name, and of older
    checkpoints the `keep_last` newest (0: all).
    """

    def __init__(
        self, path: Path, *, about: Manifest, keep_last: int = 0, owner: Owner | None = None
    ) -> None:
        super().__init__(partial_of(path))
        self._final, self._about, self._keep_last, self._owner = path, about, keep_last, owner
        # On the coordinator: its mark in the folder that it made, and whether that may be complete.
        self._mark: Path | None = None
        self._is_whole = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """No folder is made here: the coordinator's sweep would meet it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes."""
        begin(self._final, self._owner)
        self._mark = mark(self._final)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file a rank, on the disk (fsync) when this returns; none without anything in it."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write(plan, planner) if plan.items else [])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        folder, name = Path(self.path), f"{plan.storage_data.prefix}0.distcp"
        folder.mkdir(parents=True, exist_ok=True)  # on a node with a disk of its own
        results = list[WriteResult]()
        with (
            (folder / name).open("wb", buffering=0) as raw,
            HashedFile(raw) as file,
            without_crc32_of_values(),
        ):
            for item in bytes_first(plan.items):
                start = file.size_bytes
                write_item(item, planner, file)
                length = file.size_bytes - start
                file.write(bytes(-file.size_bytes % ALIGNMENT))
                info = storage_info(name, start, length)
                results.append(FileWritten(item.index, length, info))
            os.fsync(raw.fileno())
            entry = File(name=name, size_bytes=file.size_bytes, digest=str(file.digest))
        results[0] = replace(cast("FileWritten", results[0]), file=entry)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written."""
        if self._mark is None or not self._mark.exists():
            raise taken_away(self._final)
        super().finish(metadata, results)
        found = [
            result.file
            for of_rank in results
            for result in of_rank
            if isinstance(result, FileWritten) and result.file is not None
        ]
        found.append(File.of(Path(self.path), ".metadata"))
        self._is_whole = True
        self._mark.unlink()
        commit(
            self._final,
            replace(self._about, files=tuple(sorted(found, key=lambda file: file.name))),
        )
        retire(self._final.parent, keep_last=self._keep_last)

    def give_up(self) -> None:
        """After a failure, on the coordinator: what this run wrote goes."""
        if self._is_whole or (self._mark is not None and self._mark.exists()):
            abandon(self._final)


class HashedFile(RawIOBase):
    """Hashes what is written through it; `size_bytes` and `digest` of what was, so far."""

    def __init__(self, raw: Any) -> None:
        self._raw, self.digest, self.size_bytes = raw, Digest(), 0
        self._hasher = ThreadPoolExecutor(1)
        self.error: OSError | None = None

    def writable(self) -> bool:
        """For torch.save."""
        return True

    def write(self, data: Any) -> int:
        """All of it, however much the system takes at a time."""
        view = memoryview(data).cast("B")
        hashed = None
        if view.nbytes >= LARGE_BYTES:  # hashing and writing both let go of the interpreter
            hashed = self._hasher.submit(self.digest.update, view)
        else:
            self.digest.update(view)
        try:
            at = 0
            while at < view.nbytes:
                at += self._raw.write(view[at:])
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()  # the view is torch's, and ends with this call
        if view.nbytes >= LARGE_BYTES and hasattr(os, "posix_fadvise"):
            # The disk begins now, while the next value is hashed, and not when it is synced.
            place = self.size_bytes, view.nbytes
            os.posix_fadvise(self._raw.fileno(), *place, os.POSIX_FADV_DONTNEED)
        self.size_bytes += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """The hashing thread alone; the file is closed by whom it was opened."""
        self._hasher.shutdown()
        super().close()


@contextmanager
def without_crc32_of_values() -> Iterator[None]:
    """torch.save leaves out the CRC-32 that unzip would ask for: the file has one of its own.

    Of this thread (on torch 2.11 of the process); torch.load does not look at it.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def bytes_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    """The order in a file: what is no tensor, then tensors as planned."""
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def write_item(item: WriteItem, planner: SavePlanner, file: HashedFile) -> None:
    """One value as torch.save writes it; a part of a larger storage without the rest of it."""
    data = planner.resolve_data(item)
    if isinstance(data, BytesIO):
        file.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    try:
        torch.save(tensor, cast("IO[bytes]", file))
    except RuntimeError:
        if file.error is not None:  # torch complains of its own position in the file instead
            raise file.error from None
        raise

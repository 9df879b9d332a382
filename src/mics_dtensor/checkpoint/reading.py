"""Reading a checkpoint: each byte from the disk once, whatever the number of replicas.

A rank reads its files whole into host memory and hashes them. When all ranks have found theirs as
they were written, parts move to where they are needed (routing.py); until then nothing has changed.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mics_dtensor.checkpoint.digest import PIECE_BYTES, Digest
from mics_dtensor.checkpoint.held import Held
from mics_dtensor.checkpoint.manifest import NAME, Manifest, check_digest, not_a_checkpoint
from mics_dtensor.checkpoint.routing import Broadcast, Move, Part, Ranks, Route, routes
from mics_dtensor.errors import CheckpointError
from mics_dtensor.mesh import ranks_of
from mics_dtensor.world import agreed, gathered, rank_here, told

Described = tuple[Manifest | None, Metadata]


@dataclass(frozen=True)
class Around:
    """What this rank knows: its replication groups, and whether it sees the folder."""

    groups: tuple[Ranks, ...]
    sees: bool


class Reader(StorageReader):
    """Reads the checkpoint at `path` into the values of a load planner. Collective: its making too.

    `groups`: the replication groups of this rank, over which equal parts are broadcast. `device`:
    where messages lie. A folder without a manifest is read unverified if `verify` is false. Raises
    CheckpointError on every rank for what is no whole checkpoint.
    """

    def __init__(
        self,
        path: Path,
        *,
        groups: Iterable[dist.ProcessGroup] = (),
        device: torch.device | None = None,
        verify: bool = True,
    ) -> None:
        self.path = path
        self._groups = {ranks_of(group): group for group in groups if group.size() > 1}
        self._device = device or torch.device("cpu")
        paths, seen = zip(*gathered((str(path), _seen(path))), strict=True)
        if other := next((r for r, its in enumerate(paths) if its != paths[0]), 0):
            raise CheckpointError(
                f"rank 0 loads {paths[0]}, and rank {other} {paths[other]}; name the same "
                "checkpoint on every rank"
            )
        first = next((rank for rank, stamp in enumerate(seen) if stamp), 0)
        self._sees = seen[rank_here()] is not None and seen[rank_here()] == seen[first]
        said = agreed(
            lambda: _read(path, verify=verify) if rank_here() == first else None,
            others_as=CheckpointError,
        )
        self.manifest, self.metadata = cast("Described", told(said, source=first))
        self._files = {file.name: file for file in self.manifest.files} if self.manifest else {}

    # What torch.distributed.checkpoint.load calls, in this order.

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a Reader reads one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the first rank that sees it has read."""
        return self.metadata

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        """Nothing: done when it was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """On every rank: what the coordinator must know of it."""
        return replace(plan, storage_data=Around(tuple(self._groups), self._sees))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: each rank's route."""
        needs: dict[Part, list[int]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                needs.setdefault(self._part(item), []).append(rank)
        around: list[Around] = [plan.storage_data for plan in plans]
        found = routes(
            {part: sorted(set(ranks)) for part, ranks in needs.items()},
            sizes={file: self._size(file) for file in {part.file for part in needs}},
            readers=[rank for rank, its in enumerate(around) if its.sees],
            groups=[its.groups for its in around],
        )
        return [replace(plan, storage_data=r) for plan, r in zip(plans, found, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """On every rank: read, agree, and bring everything to its place."""
        route: Route = plan.storage_data
        wanted: dict[Part, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._part(item), []).append(item)
        files = agreed(
            lambda: {name: self._read_file(name) for name in route.files},
            others_as=CheckpointError,
        )
        held = Held(files)

        def deliver(part: Part, data: torch.Tensor) -> None:
            for item in wanted.pop(part, []):
                self._put(item, data, planner)

        for moves in route.rounds:
            held.arrived |= _exchange(moves, held, self._device)
        for message in route.broadcasts:
            group = self._groups[message.group] if message.group else None
            for part, data in _broadcast_parts(message, held, group, self._device):
                deliver(part, data)
        for part in list(wanted):
            deliver(part, held.of(part))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders of a file system alone."""
        return "://" not in str(checkpoint_id)

    def _part(self, item: ReadItem) -> Part:
        info = self.metadata.storage_data[item.storage_index]
        name, is_tensor = item.storage_index.fqn, item.type == LoadItemType.TENSOR
        size, offsets, lengths = int(info.length), tuple[int, ...](), tuple[int, ...]()
        if is_tensor:
            offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
            size = prod(lengths) * self._dtype(name).itemsize
        place = (name, info.relative_path, info.offset, info.length)
        return Part(*place, offsets, lengths, size, is_tensor)

    def _dtype(self, name: str) -> torch.dtype:
        return cast(
            "TensorStorageMetadata", self.metadata.state_dict_metadata[name]
        ).properties.dtype

    def _size(self, name: str) -> int:
        its = self._files.get(name)
        return its.size_bytes if its is not None else (self.path / name).stat().st_size

    def _read_file(self, name: str) -> memoryview:
        path, its = self.path / name, self._files.get(name)
        if its is None and self.manifest is not None:
            raise CheckpointError(f"{path} is not among the files of the manifest")
        digest = None if its is None else its.new_digest()
        data = read_whole(path, digest)
        if its is not None:
            check_digest(path, its, str(digest))
        return data

    def _put(self, item: ReadItem, data: torch.Tensor, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, BytesIO(data.cpu().numpy().tobytes()))
            return
        target = planner.resolve_tensor(item).detach()
        target.copy_(data.view(self._dtype(item.storage_index.fqn)).view(tuple(item.lengths)))
        planner.commit_tensor(item, target)


def read_whole(path: Path, digest: Digest | None = None) -> memoryview:
    """The bytes of a file; `digest` hears of each piece while the next one comes."""
    data, at = _empty(path.stat().st_size), 0
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        while num_read := file.readinto(data[at : at + PIECE_BYTES]):
            if digest is not None:
                hasher.submit(digest.update, data[at : at + num_read])
            at += num_read
    return data[:at]


def _empty(num_bytes: int) -> memoryview:
    """Memory that nobody has written; a bytearray would be filled with zeros first."""
    if not num_bytes:
        return memoryview(bytearray())
    data = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        data.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(data)


def _exchange(moves: list[Move], held: Held, device: torch.device) -> dict[Part, torch.Tensor]:
    """One all-to-all over the world: the parts that came. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out = [[m.part for m in moves if (m.source, m.target) == (rank, r)] for r in range(world_size)]
    into = [[m.part for m in moves if (m.source, m.target) == (r, rank)] for r in range(world_size)]
    sent = _packed([held.of(part) for parts in out for part in parts], device)
    arriving = [part for parts in into for part in parts]
    came = torch.empty(_size_of(arriving), dtype=torch.uint8, device=device)
    dist.all_to_all_single(came, sent, [_size_of(p) for p in into], [_size_of(p) for p in out])
    return dict(_cut(arriving, came))


def _broadcast_parts(
    message: Broadcast, held: Held, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[Part, torch.Tensor]]:
    """The parts of one broadcast over a replication group, or the world. Collective over it."""
    if message.lead == dist.get_rank():
        data = _packed([held.of(part) for part in message.parts], device)
    else:
        data = torch.empty(_size_of(message.parts), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=message.lead, group=group)
    return _cut(message.parts, data)


def _packed(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return data.to(device)


def _size_of(parts: Iterable[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def _cut(parts: Iterable[Part], data: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    at = 0
    for part in parts:
        # A copy: the next value of another dtype would not start at a multiple of its size.
        yield part, data[at : at + part.size_bytes].clone()
        at += part.size_bytes


def _seen(path: Path) -> tuple[int, int] | None:
    """By which ranks tell whether they see the same folder, or one of that name on their node."""
    for name in (NAME, ".metadata"):
        try:
            its = (path / name).stat()
        except OSError:
            continue
        return its.st_size, its.st_mtime_ns
    return None


def _read(path: Path, *, verify: bool) -> Described:
    """Both descriptions, on the first rank that sees them."""
    manifest = None
    if verify or (path / NAME).exists():
        manifest = Manifest.read(path)
        manifest.check_sizes(path)
        known = {file.name: file for file in manifest.files}
        its = known.get(".metadata")
        if its is None:
            raise CheckpointError(
                f"{path} holds Hugging Face's files: load it with checkpoint.initial_load_path and "
                "initial_load_in_hf = true"
            )
        digest = its.new_digest()
        data = read_whole(path / ".metadata", digest)
        check_digest(path / ".metadata", its, str(digest))
    else:
        try:
            data = read_whole(path / ".metadata")
        except OSError:
            raise CheckpointError(not_a_checkpoint(path)) from None
    metadata: Metadata = pickle.loads(data)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return manifest, metadata

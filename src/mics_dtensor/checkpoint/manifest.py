"""manifest.json: what a checkpoint holds, and by which it is known to be whole. Pure, no torch.

It is the last file that is written into the folder of a checkpoint, before that folder gets its
name; docs/formats.md has its keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, get_args

from mics_dtensor.checkpoint.digest import PIECE_BYTES, Digest
from mics_dtensor.errors import CheckpointError

SCHEMA = 2
NAME = "manifest.json"
Contents = Literal["training", "model"]


class Damaged(CheckpointError):
    """A checkpoint that is not what was written; an older one may still be."""


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a checkpoint: its name in the folder ("/" between folders), size and digest."""

    name: str
    size_bytes: int
    digest: str

    @classmethod
    def of(cls, folder: Path, name: str) -> File:
        """The entry of a file that is written; reads it once."""
        path = folder / name
        return cls(name=name, size_bytes=path.stat().st_size, digest=digest_of(path, Digest()))

    def new_digest(self) -> Digest:
        """Of the kind of this file's, to be fed with its bytes."""
        return Digest(self.digest.partition(":")[0])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The keys of manifest.json, but for `schema`.

    `contents`: "training" can be resumed from, "model" is weights alone. `tokens`: seen by the run
    until `step`. `layout`: world_size, ranks_per_node, partition_size, tensor_parallel_size of the
    run that wrote it. `config`: the resolved run. `data`: where the data loaders stood.
    `completed_s`: when it was completed, in seconds since 1970, later than all others of its
    folder then; set by `commit`. None where the writer did not know.
    """

    step: int
    contents: Contents
    files: tuple[File, ...]
    tokens: int | None = None
    layout: Mapping[str, int] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    data: Mapping[str, int] | None = None
    completed_s: float | None = None

    def to_text(self) -> str:
        """The JSON of the file."""
        return json.dumps({"schema": SCHEMA} | asdict(self), indent=1, default=str) + "\n"

    def write(self, folder: Path) -> None:
        """Put it into `folder`, and the folder itself, on the disk (fsync)."""
        with (folder / NAME).open("w", encoding="utf-8") as file:
            file.write(self.to_text())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint. Raises CheckpointError where it is not one, or is newer."""
        path = folder / NAME
        try:
            return cls.from_text(path.read_text(encoding="utf-8"), path)
        except UnicodeDecodeError as error:
            raise damaged(path, f"is not text ({error})") from None
        except OSError:
            kind = Damaged if step_of(folder.name) is not None else CheckpointError
            raise kind(not_a_checkpoint(folder)) from None

    @classmethod
    def from_text(cls, text: str, path: Path) -> Manifest:
        """`path` is what errors name."""
        try:
            written = json.loads(text)
            schema = written["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(path, f"cannot be read ({type(error).__name__}: {error})") from None
        if not isinstance(schema, int) or schema > SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema!r}, and this version of mics_dtensor reads up to "
                f"{SCHEMA}: install the version that wrote it ({_version(written)}) or a newer one"
            )
        try:
            known = {key: written[key] for key in cls.__dataclass_fields__ if key in written}
            files = tuple(_file(entry) for entry in known.pop("files"))
            manifest = cls(files=files, **known)
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(path, f"lacks a key ({type(error).__name__}: {error})") from None
        if manifest.contents not in get_args(Contents) or not isinstance(manifest.step, int):
            raise damaged(path, f"holds step {manifest.step!r}, contents {manifest.contents!r}")
        return manifest

    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)

    def check_sizes(self, folder: Path) -> None:
        """Every file is there and as long as it was. Reads none. Raises CheckpointError."""
        for file in self.files:
            path = folder / file.name
            try:
                found = path.stat().st_size
            except OSError:
                raise damaged(path, "is missing") from None
            if found != file.size_bytes:
                raise damaged(path, f"has {found} bytes, and {file.size_bytes} were written")

    def check(self, folder: Path) -> None:
        """Every file is what was written: reads all of them. Raises CheckpointError."""
        self.check_sizes(folder)
        for file in self.files:
            path = folder / file.name
            check_digest(path, file, digest_of(path, file.new_digest()))


def check_digest(path: Path, file: File, found: str) -> None:
    """Raise CheckpointError where a file of the right size has other bytes than were written."""
    if found != file.digest:
        kind, _, its = file.digest.partition(":")
        said = f"{kind} {found.removeprefix(f'{kind}:')[:12]}, not {its[:12]}"
        raise damaged(path, f"has other bytes than were written ({said})")


def damaged(path: Path, how: str) -> Damaged:
    """The error of a file that is not what was written."""
    return Damaged(
        f"{path} {how}: this checkpoint is damaged; load another step, or restore the file"
    )


def not_a_checkpoint(folder: Path) -> str:
    """The sentence for a path at which no checkpoint of ours is."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        others = ", ".join(path.name for path in step_folders(folder.parent)[-5:])
        such = f"such as {others} beside it" if others else "such as .../step-100"
        return f"{folder} {what}; name the folder of a checkpoint, {such}"
    if found := [path.name for path in step_folders(folder)]:
        return (
            f"{folder} holds checkpoints and is none itself; name one of them: "
            f"{', '.join(found[-5:])}"
        )
    if (folder / ".metadata").is_file():
        return (
            f"{folder} has no {NAME}: either it was never completed, or another program wrote it "
            "(torchtitan, torch.distributed.checkpoint), and then its bytes cannot be verified"
        )
    return f"{folder} is not a checkpoint: it has no {NAME}"


def step_folders(folder: Path) -> list[Path]:
    """The folders named step-N in `folder`, by ascending N; complete by their name, not checked."""
    found = [(step_of(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for step, path in sorted(f for f in found if f[0] is not None) if path.is_dir()]


def step_of(name: str) -> int | None:
    """N of "step-N"; None for every other name."""
    start, _, number = name.partition("step-")
    plain = number.isascii() and number.isdigit() and str(int(number)) == number
    return int(number) if not start and plain else None


def digest_of(path: Path, digest: Digest) -> str:
    """What `digest` says of a file; reads all of it."""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return str(digest)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def versions(*distributions: str) -> dict[str, str]:
    """The versions of mics_dtensor and of those that are installed of the ones named."""
    package = __name__.partition(".")[0]
    found = {package: str(import_module(package).__version__)}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def files_of(folder: Path, names: Iterable[str]) -> tuple[File, ...]:
    """The entries of files that are written; reads each once."""
    return tuple(File.of(folder, name) for name in sorted(names))


def _file(entry: Mapping[str, Any]) -> File:
    digest = entry["digest"] if "sha256" not in entry else f"sha256:{entry['sha256']}"  # schema 1
    return File(name=entry["name"], size_bytes=entry["size_bytes"], digest=digest)


def _version(written: Mapping[str, Any]) -> str:
    its = written.get("versions")
    return str(its.get("mics_dtensor", "unknown")) if isinstance(its, Mapping) else "unknown"

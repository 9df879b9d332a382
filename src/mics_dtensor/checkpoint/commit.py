"""A checkpoint appears under its name when it is complete, and not before. Pure: files, no torch.

It is written as step-N.partial. When every file is on the disk the manifest is written, and the
folder is renamed to step-N, which a crash either sees done or not done.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

from mics_dtensor.checkpoint.age import completed_s, later_than, oldest_first
from mics_dtensor.checkpoint.manifest import NAME, Manifest, step_folders, step_of, sync_folder
from mics_dtensor.checkpoint.owner import Owner
from mics_dtensor.errors import CheckpointError

logger = logging.getLogger(__name__)

PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"


def partial_of(path: Path) -> Path:
    """Where the checkpoint `path` lies while it is written."""
    return path.with_name(path.name + PARTIAL)


def begin(path: Path, owner: Owner | None = None) -> None:
    """Make the empty folder that `commit` will rename to `path`; by one rank, before any writes.

    What a crash has left beside it goes, except for what is needed. Raises CheckpointError where a
    file is in the way, or another run writes there (`owner`: the claim of this one).
    """
    folder = path.parent
    for its in (path, folder):
        if its.exists() and not its.is_dir():
            raise CheckpointError(
                f"{its} is a file, in the way of a folder: move it, or name another"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if owner is not None:
        owner.take(folder)
    for left in folder.iterdir():
        if left.suffix not in (PARTIAL, REPLACED, DELETED) or step_of(left.stem) is None:
            continue
        if not left.is_dir():
            left.unlink()
        elif left.suffix == REPLACED and not left.with_suffix("").exists():
            left.rename(left.with_suffix(""))  # the crash came between the two renames of `commit`
        else:
            shutil.rmtree(left)
    partial_of(path).mkdir()


def mark(path: Path) -> Path:
    """A file in the folder that `begin` made, by which its writer knows it again."""
    its = partial_of(path) / f".{uuid.uuid4().hex}.writer"
    its.touch()
    return its


def taken_away(path: Path) -> CheckpointError:
    """What is said where the folder that `begin` made, or the mark in it, is gone."""
    return CheckpointError(
        f"{partial_of(path)} was taken away while it was written: another run writes into the same "
        f"folder, {path.parent}, and swept it as what a crash had left; give each run a folder of "
        "its own (in the program checkpoint.folder or job.dump_folder)"
    )


def commit(path: Path, manifest: Manifest) -> Manifest:
    """Complete `path`, all files of which are on the disk; by one rank, after all have written.

    A checkpoint that was there under that name gives way, and this one is the newest from now on,
    whatever the steps of the others. Returns the manifest, with the time of it. Raises
    CheckpointError where a file is not seen from here, OSError where the disk refuses.
    """
    partial = partial_of(path)
    if unseen := [file.name for file in manifest.files if not (partial / file.name).is_file()]:
        raise CheckpointError(
            f"{partial}: this rank does not see {', '.join(unseen[:3])}, which other ranks wrote: "
            "the folder is on a disk of each node; name one that all nodes share, or set placement "
            '"partition_group", which writes the whole copy from the ranks of one partition group'
        )
    manifest.check_sizes(partial)
    others = aged(path.parent)
    at_s = later_than(map(completed_s, others.values()))
    completed = replace(manifest, completed_s=at_s)
    completed.write(partial)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    sync_folder(path.parent)
    step = step_of(path.name)
    if step is not None and others and list(others)[-1] > step:
        logger.warning(
            "%s follows %s, a later step: the run went back, and goes on from %s from now on",
            path,
            f"step-{list(others)[-1]}",
            path.name,
        )
    if replaced.exists():
        shutil.rmtree(replaced)
        logger.info("replaced the checkpoint %s", path)
    return completed


def abandon(path: Path) -> None:
    """Give the space of a failed write back; never an error of its own."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def named(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, ascending; complete by their names, not verified."""
    found = {step_of(path.name): path for path in step_folders(folder)}
    for left in folder.glob(f"step-*{REPLACED}"):  # see `begin`
        found.setdefault(step_of(left.stem), left)
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def aged(folder: Path) -> dict[int, Path]:
    """The same by when they were completed, the newest at the end; reads their manifests."""
    found = named(folder)
    return {its: found[its] for its in oldest_first({s: completed_s(p) for s, p in found.items()})}


def refuse_no_folder(folder: Path) -> None:
    """Raise CheckpointError where a run would find nothing to go on from, and begin anew."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name the folder that holds the checkpoints")
    if (folder / NAME).exists():
        raise CheckpointError(
            f"{folder} is itself a checkpoint; name the folder that holds it: {folder.parent}"
        )


def is_whole(path: Path) -> bool:
    """Whether the manifest can be read and every file is as long as it says. Reads no data."""
    return what_is_wrong(path) is None


def what_is_wrong(path: Path) -> CheckpointError | None:
    """The error that the sizes of its files, or its manifest, give a checkpoint."""
    try:
        Manifest.read(path).check_sizes(path)
    except CheckpointError as error:
        return error
    return None


def retire(folder: Path, *, keep_last: int) -> list[Path]:
    """Delete what is older than the `keep_last` newest whole checkpoints; what was deleted.

    The newest are those that were completed last, not those of the highest steps. Damaged ones
    count for nothing, so the only good one stays, and so does the newest that a run can be resumed
    from. 0 keeps all. To be called after a commit, by one rank.
    """
    found = list(aged(folder).values())
    whole = [path for path in reversed(found) if is_whole(path)]  # newest first
    if not keep_last or len(whole) <= keep_last:
        return []
    resumable = next((p for p in whole if Manifest.read(p).contents == "training"), None)
    oldest = found.index(whole[keep_last - 1])
    gone = [path for path in found[:oldest] if path != resumable]
    for path in gone:
        deleted = path.with_name(path.name + DELETED)
        path.rename(deleted)  # so that half of it is never found under its name
        shutil.rmtree(deleted)
        logger.info("deleted the checkpoint %s", path)
    return gone

"""The files of a DeepSpeed checkpoint, or the sentence that says why a folder is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mics_dtensor.errors import CheckpointError

OPTIMIZER_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model_rank>\d+)_?optim_states\.pt"
)
MODEL_FILE = re.compile(
    r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model_rank>\d+)_model_states\.pt"
)


@dataclass(frozen=True)
class ZeroFolder:
    """The folder of one tag, such as global_step100, and its files by data-parallel rank.

    ZeRO-3 writes a model file a rank; ZeRO-1 and 2 write one for all. MiCS writes the files of one
    partition group, under the ranks in it.
    """

    path: Path
    optimizer_files: tuple[Path, ...]
    model_files: tuple[Path, ...]

    @classmethod
    def find(cls, path: Path) -> ZeroFolder:
        """`path` is the folder that DeepSpeed saved to (with `latest`), or that of a tag in it.

        Reads no file but `latest`. Raises CheckpointError, by name, for the other layouts of
        DeepSpeed and for what is no checkpoint of it.
        """
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {what}; name the folder that DeepSpeed saved to")
        folder = _of_tag(path)
        names = sorted(each.name for each in folder.iterdir())
        _refuse_other_layouts(folder, names)
        optimizer = _by_rank(folder, OPTIMIZER_FILE, names)
        model = _by_rank(folder, MODEL_FILE, names)
        if not optimizer:
            raise CheckpointError(_no_optimizer_files(folder, names, has_model=bool(model)))
        if not model:
            raise CheckpointError(
                f"{folder} has optimizer files and no *_model_states.pt, which say the names and "
                "shapes of what those hold; copy them from where the checkpoint was written"
            )
        world_size = max(optimizer) + 1
        _refuse_gaps(folder, "optim_states", optimizer, world_size)
        if len(model) > 1:
            _refuse_gaps(folder, "model_states", model, world_size)
        return cls(
            folder,
            tuple(optimizer[rank] for rank in range(world_size)),
            tuple(model[rank] for rank in sorted(model)),
        )


def _of_tag(path: Path) -> Path:
    """The folder of the tag in `latest`, or `path` itself."""
    if any(_is_zero_file(each.name) for each in path.iterdir()) or not (path / "latest").is_file():
        return path
    tag = (path / "latest").read_text(encoding="utf-8", errors="replace").strip()
    if not tag or Path(tag).name != tag:  # it may come from anywhere: no way out of the folder
        raise CheckpointError(f"{path / 'latest'} holds {tag!r}, which is not the name of a folder")
    if not (path / tag).is_dir():
        there = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise CheckpointError(
            f"{path / 'latest'} names {tag}, which is not there; name one of the folders that are: "
            f"{', '.join(there) or 'there is none'}"
        )
    return path / tag


def tags_of(path: Path) -> list[Path]:
    """The folders of a tag that `path` is, or holds; none where it is not of DeepSpeed."""
    if not path.is_dir():
        return []
    return [
        folder
        for folder in (path, *sorted(each for each in path.iterdir() if each.is_dir()))
        if any(_is_zero_file(each.name) for each in folder.iterdir())
    ]


def _is_zero_file(name: str) -> bool:
    return bool(OPTIMIZER_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name))


def _refuse_other_layouts(folder: Path, names: Iterable[str]) -> None:
    if (folder / "zero").is_dir() and any(each.is_dir() for each in (folder / "zero").iterdir()):
        raise CheckpointError(
            f"{folder} is a universal checkpoint (of ds_to_universal.py), which is not read; "
            "convert the ZeRO checkpoint that it was made from. Where that is gone: load this one "
            "in DeepSpeed (checkpoint.load_universal = true), and save_checkpoint() once"
        )
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"{folder} has optimizer states that were swapped to NVMe (offloaded_tensors), in "
            "files without names; load it in DeepSpeed with offload_optimizer.device = cpu, and "
            "save_checkpoint() once"
        )
    for name in names:
        if "expert_" in name and name.endswith("_states.pt"):
            raise CheckpointError(
                f"{folder} holds experts of DeepSpeed-MoE ({name}), which are not converted; "
                "write the weights with DeepSpeed's own means, or train the experts on"
            )
        if re.match(r"layer_\d+.*-model_.*states\.pt", name):
            raise CheckpointError(
                f"{folder} was saved by a pipeline ({name}); only ZeRO without pipeline stages is "
                "converted: ds_to_universal.py, then a load without pipeline and save_checkpoint() "
                "once, makes such a checkpoint"
            )
        found = OPTIMIZER_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name)
        if found and int(found["model_rank"]):
            raise CheckpointError(
                f"{folder} was saved with tensor parallel ({name}); only ZeRO without it is "
                "converted: ds_to_universal.py, then a load with a tensor-parallel size of 1 and "
                "save_checkpoint() once, makes such a checkpoint"
            )


def _by_rank(folder: Path, pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match["rank"] or 0)
            if rank in found:
                raise CheckpointError(
                    f"{folder} holds {found[rank].name} and {name}, both of rank {rank}: two runs "
                    "saved into it; keep the files of one"
                )
            found[rank] = folder / name
    return found


def _refuse_gaps(folder: Path, kind: str, found: Mapping[int, Path], world_size: int) -> None:
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{folder} has *_{kind}.pt of {len(found)} ranks and lacks those of ranks "
            f"{', '.join(map(str, missing[:10]))}; copy them from the nodes that wrote them"
        )


def _no_optimizer_files(folder: Path, names: list[str], *, has_model: bool) -> str:
    if has_model:
        return (
            f"{folder} has no *_optim_states.pt: it was saved without ZeRO, or is not whole. "
            "Without ZeRO its weights lie whole under 'module' of *_model_states.pt, and "
            "torch.load reads them"
        )
    if "manifest.json" in names or ".metadata" in names:
        return f"{folder} is not DeepSpeed's: it is a checkpoint of torch.distributed.checkpoint"
    if tags := [str(each) for each in tags_of(folder)]:
        return (
            f"{folder} has no file `latest`, which names the tag to take; give the folder of one: "
            f"{', '.join(tags[-5:])}"
        )
    there = ", ".join(names[:5]) or "nothing"
    return f"{folder} is not a checkpoint of DeepSpeed; it holds {there}"

"""A folder as Hugging Face has it: safetensors in files of a limited size, and their index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mics_dtensor.checkpoint.convert.lazy import LazyTensors
from mics_dtensor.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def write_safetensors(folder: Path, tensors: LazyTensors, *, file_bytes: int) -> list[str]:
    """Writes model-00001-of-0000n.safetensors (model.safetensors if one will do) and the index.

    The tensors of one file are in memory at a time. Returns the names of the files. Raises
    CheckpointError where safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "safetensors is not installed: pip install mics-dtensor[convert]; or write one torch "
            "file, which needs nothing: an OUT that ends in .pt"
        ) from None
    files = list(_cut(tensors, file_bytes))
    names = [
        "model.safetensors"
        if len(files) == 1
        else f"model-{number:05}-of-{len(files):05}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    for name, held in zip(names, files, strict=True):
        # Copies: safetensors refuses tensors that share memory, as tied weights may.
        whole = {key: tensors[key].read().clone().contiguous() for key in held}
        save_file(whole, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, held in zip(names, files, strict=True) for key in held}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*names, INDEX]


def _cut(tensors: LazyTensors, file_bytes: int) -> Iterator[list[str]]:
    """Consecutive names, of `file_bytes` together at most unless a single one is larger."""
    held: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        if held and filled + tensor.nbytes > file_bytes:
            yield held
            held, filled = [], 0
        held.append(name)
        filled += tensor.nbytes
    if held:
        yield held

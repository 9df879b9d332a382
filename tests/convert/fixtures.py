"""The checkpoints that make_deepspeed_fixtures.py has DeepSpeed write."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

FIXTURES = Path(__file__).parent / "deepspeed"
CASES = sorted(path.name for path in FIXTURES.iterdir())


def expected(case: str) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed's own safe_get_full_* functions said: parameters, exp_avg, exp_avg_sq."""
    found: dict[str, dict[str, torch.Tensor]]
    found = torch.load(FIXTURES / case / "expected.pt", weights_only=True)
    assert found["parameters"]
    return found


def tag_of(checkpoint: Path) -> Path:
    """The folder of the only tag in it."""
    [tag] = [path for path in checkpoint.iterdir() if path.is_dir()]
    return tag


def held(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint of torch.distributed.checkpoint, by its flat name."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    into: dict[str, Any] = {
        name: torch.empty(its.size, dtype=its.properties.dtype) if hasattr(its, "size") else None
        for name, its in metadata.items()
    }
    dcp.load(into, checkpoint_id=path, no_dist=True)
    return into

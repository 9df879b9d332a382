"""Files of torch.save that may come from anywhere, read without running anything of theirs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mics_dtensor.errors import CheckpointError


class Inert:
    """What stands in for an object of another program: it keeps attributes and has no methods."""

    def __init__(self, *_: object) -> None:
        pass


def _stand_in(name: str) -> type:
    return type(name.rpartition(".")[2], (Inert,), {})


STAND_INS: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    **{
        name: _stand_in(name)
        for name in (
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            "argparse.Namespace",  # Megatron's arguments, in the client state
        )
    },
}
"""By the name that DeepSpeed 0.16 to 0.19 pickle; anything else is not theirs."""


def load_restricted(path: Path, *, inert: Sequence[str] = ()) -> Any:
    """The object in a file of torch.save; its tensors stay in the file (mmap) until they are used.

    Classes and functions beyond torch's own list of harmless ones are refused by name; those in
    `inert` are read as empty objects. Raises CheckpointError; nothing of the file has run.
    """
    known = {**STAND_INS, **{name: _stand_in(name) for name in inert}}
    try:
        unknown = sorted(set(get_unsafe_globals_in_checkpoint(path)) - set(known))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from None
    if unknown:
        raise CheckpointError(
            f"{path} holds objects of {', '.join(unknown)}: unpickling would run code that "
            f"DeepSpeed's own state has no use for, so nothing was read. If you know them, give "
            f"{' '.join(f'--as-inert {name}' for name in unknown)}: they are then read as empty "
            "objects, still without running anything"
        )
    try:
        with safe_globals([(made, name) for name, made in known.items()]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        OSError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a whole file of torch.save ({str(error).splitlines()[0][:160]}); copy it "
        "again from where it was written, or take an earlier checkpoint"
    )

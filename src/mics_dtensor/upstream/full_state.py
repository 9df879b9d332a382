"""Who asks for a state dict: torch's functions for whole tensors do not know our pieces."""

from __future__ import annotations

from inspect import currentframe

from torch.distributed.checkpoint.state_dict import _StateDictInfo


def full_state_is_asked() -> bool:
    """Whether get_model_state_dict and its like are calling, with full_state_dict=True.

    They take every tensor that is not a DTensor for a whole one, and would hand over a piece: told
    from the caller, who must be given DTensors. The innermost that asks decides.
    """
    frame = currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _StateDictInfo.__module__:
            info = frame.f_locals.get("info")
            if isinstance(info, _StateDictInfo):
                return info.full_state_dict
        frame = frame.f_back
    return False

"""A stage of communication: a named range in the trace, and a name in the error where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.profiler import record_function

from mics_dtensor.errors import CommunicationError


@contextmanager
def stage(what: str, unit: str, group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Run one stage over `group` for `unit`; a failure or timeout becomes a CommunicationError."""
    with record_function(f"mics::{what} ({unit})"):
        try:
            yield group
        except RuntimeError as error:
            raise CommunicationError(
                f"{what} failed for unit {unit or '(unnamed)'} on rank {dist.get_rank()}, in the "
                f"group of ranks {dist.get_process_group_ranks(group)}: {error}"
            ) from error

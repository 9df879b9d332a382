"""What is said of a checkpoint that `mics convert deepspeed` wrote for something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mics_dtensor.checkpoint.manifest import Damaged, Manifest
from mics_dtensor.errors import CheckpointError


@contextmanager
def way_on(manifest: Manifest | None) -> Iterator[None]:
    """Names the command that was meant, in errors of a checkpoint that was converted for a script.

    Without --config-file a conversion keeps the names of the script's own model, and its manifest
    knows no run.
    """
    try:
        yield
    except CheckpointError as error:
        its = manifest is not None and "deepspeed" in manifest.versions and manifest.config is None
        if not its or isinstance(error, Damaged):
            raise
        raise CheckpointError(
            f"{error}; it was converted from DeepSpeed without --config-file, so names and layouts "
            "are those of a script: delete it, and convert again with this run's file: mics "
            "convert deepspeed OLD_RUN CHECKPOINT --config-file RUN.toml"
        ) from error

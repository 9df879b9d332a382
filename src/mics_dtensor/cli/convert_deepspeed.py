"""`mics convert deepspeed CHECKPOINT OUT`: a checkpoint of ZeRO or MiCS becomes one of ours."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mics_dtensor.train.load import load
from mics_dtensor.train.values import counted

if TYPE_CHECKING:
    from mics_dtensor.checkpoint.convert.resumable import Target
    from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint

SUMMARY = (
    "  deepspeed CHECKPOINT OUT         a ZeRO or MiCS checkpoint of DeepSpeed, to resume from here"
)


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    parser = argparse.ArgumentParser(
        prog="mics convert deepspeed",
        description="Reads a checkpoint of DeepSpeed (ZeRO-1, 2, 3 or MiCS, of 0.16 to 0.19) and "
        "writes one of ours: weights and moments bit for bit. With --config-file other arguments "
        "are overrides: --section.key value.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="what DeepSpeed saved to, or a tag in it")
    parser.add_argument("out", type=Path, help="the checkpoint to write, such as .../step-1000")
    parser.add_argument(
        "--config-file", help="a run of the program: names and layouts become those of its model"
    )
    parser.add_argument("--weights-only", action="store_true", help="without the optimizer")
    parser.add_argument(
        "--as-inert",
        action="append",
        default=[],
        metavar="MODULE.NAME",
        help="read objects of this class as empty ones, instead of refusing the file",
    )
    options, overrides = parser.parse_known_args(list(argv))
    if overrides and options.config_file is None:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    # Here, since the other commands run without torch.
    from mics_dtensor.checkpoint.convert.resumable import Target, write_resumable
    from mics_dtensor.checkpoint.convert.zero_checkpoint import ZeroCheckpoint

    found = ZeroCheckpoint.open(options.checkpoint, inert=options.as_inert)
    if options.weights_only:
        found = replace(found, moments={}, steps={})
    target = Target()
    if options.config_file is not None:
        target = _target(found, ["--config-file", options.config_file, *overrides])
    manifest = write_resumable(found, options.out, target)
    progress = found.progress
    kinds = ", ".join(found.moments) or "none"
    said = [
        f"{options.out}: step {manifest.step}, {manifest.size_bytes():,} bytes in "
        f"{counted(len(manifest.files), 'file')}",
        f"from {found.path} (DeepSpeed {found.version}, ZeRO-{found.stage}, {found.world_size} "
        f"files a kind, "
        f"{counted(progress.data_parallel_size, 'data-parallel rank')})",
        f"{counted(len(found.weights), 'trained parameter')} in "
        f"{counted(len(found.options), 'group')} of the optimizer, "
        f"states {kinds}; {len(found.frozen)} frozen, {len(found.tied)} tied, "
        f"{counted(len(found.buffers), 'buffer')}",
    ]
    said += [f"not carried over: {words}" for words in found.left_behind]
    return "\n".join(said)


def _target(found: ZeroCheckpoint, argv: Sequence[str]) -> Target:
    from mics_dtensor.checkpoint.convert.resumable import Target
    from mics_dtensor.train.weights import RunWeights

    config = load(argv).config
    weights = RunWeights(config)
    own = weights.are_named(found.model())
    if not own:
        weights.check_hf({name: its.shape for name, its in found.model().items()})
    implementation = config.optimizer.implementation
    return Target(
        translation=None if own else weights.from_hf,
        of_moments=(
            weights.as_parameters
            if own
            else lambda tensors: weights.as_parameters(weights.from_hf(tensors))
        ),
        check=weights.check,
        seq_len=config.training.seq_len,
        config=asdict(config),
        options={
            "fused": implementation.startswith("fused"),
            "foreach": implementation == "foreach",
            "capturable": False,
            "differentiable": False,
        },
    )

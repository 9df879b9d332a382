"""`mics convert hf CHECKPOINT OUT`: weights as Hugging Face has them, or as one torch file."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mics_dtensor.checkpoint.commit import partial_of
from mics_dtensor.checkpoint.convert.zero_folder import tags_of
from mics_dtensor.checkpoint.manifest import NAME, Manifest
from mics_dtensor.errors import CheckpointError, ConfigError
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.load import config_from, load
from mics_dtensor.train.values import counted

if TYPE_CHECKING:
    from mics_dtensor.checkpoint.convert.lazy import LazyTensor

SUMMARY = "  hf CHECKPOINT OUT                safetensors with their index; OUT.pt: one torch file"
FILE_BYTES = 5_000_000_000  # Hugging Face's own default
TORCH_FILE = (".pt", ".pth", ".bin")
ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.model",
)


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    parser = argparse.ArgumentParser(
        prog="mics convert hf",
        description="The weights of a checkpoint as safetensors with an index, or as one file of "
        "torch.save where OUT ends in .pt, .pth or .bin. Other arguments are overrides of the run: "
        "--section.key value.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="such as outputs/checkpoint/step-1000")
    parser.add_argument("out", type=Path, help="a folder, or a file that ends in .pt, .pth or .bin")
    parser.add_argument("--config-file", help="the run it is of, where its manifest does not say")
    parser.add_argument(
        "--names",
        choices=["hf", "own"],
        help="Hugging Face's names and layouts (where the run is known: not given), or its own",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="not given: as it is stored"
    )
    parser.add_argument(
        "--file-bytes", type=int, default=FILE_BYTES, help="most of one safetensors file"
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not hold the files against the manifest first; needed where there is none",
    )
    options, overrides = parser.parse_known_args(list(argv))
    if overrides and options.config_file is None:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.file_bytes < 1:
        raise ConfigError(f"--file-bytes {options.file_bytes}; give 1 or more")
    out: Path = options.out
    if out.exists():
        raise CheckpointError(f"{out} exists; name what does not, nothing is overwritten")
    if tags_of(options.checkpoint):
        raise CheckpointError(
            f"{options.checkpoint} is a checkpoint of DeepSpeed: `mics convert deepspeed "
            f"{options.checkpoint} .../step-N` makes one of ours, which this command takes"
        )
    # Here, since the other commands run without torch.
    from mics_dtensor.checkpoint.convert.stored import stored_weights

    tensors = stored_weights(options.checkpoint, verify=not options.no_verify)
    config = _config(options, overrides)
    said, assets = ["names and layouts are the checkpoint's own"], None
    if options.names != "own" and config is not None:
        tensors, said, assets = _in_hf(tensors, config)
    if options.dtype is not None:
        import torch

        tensors = {name: its.to(getattr(torch, options.dtype)) for name, its in tensors.items()}
    said += _write(out, tensors, options.file_bytes, assets)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return "\n".join([f"{out}: {counted(len(tensors), 'tensor')}, {num_bytes:,} bytes", *said])


def _config(options: argparse.Namespace, overrides: list[str]) -> RunConfig | None:
    """The run's: as given, else as the manifest has it."""
    if options.config_file is not None:
        return load(["--config-file", options.config_file, *overrides]).config
    manifest = options.checkpoint / NAME
    tables = Manifest.read(options.checkpoint).config if manifest.is_file() else None
    if tables is None and options.names == "hf":
        raise ConfigError(f"which model is it? {manifest} does not say; give --config-file")
    return None if tables is None else config_from(tables, str(manifest))


def _in_hf(
    tensors: dict[str, LazyTensor], config: RunConfig
) -> tuple[dict[str, LazyTensor], list[str], Path | None]:
    from mics_dtensor.checkpoint.convert.lazy import translated
    from mics_dtensor.train.weights import RunWeights

    weights = RunWeights(config)
    weights.check({name: its.shape for name, its in tensors.items()})
    lost, buffers = weights.not_exported()
    if lost:
        raise CheckpointError(
            f"torchtitan's adapter for {weights.label} has no Hugging Face name for "
            f"{', '.join(lost[:10])}: they would be lost; give --names own"
        )
    said = [f"names and layouts are those of Hugging Face for {weights.label}"]
    said += [f"not exported: {name}, which Hugging Face's model does not have" for name in buffers]
    path = config.model.tokenizer_path or config.model.hf_assets_path
    assets = Path(path) if path and Path(path).is_dir() else None
    return translated(tensors, weights.to_hf), said, assets


def _write(
    out: Path, tensors: dict[str, LazyTensor], file_bytes: int, assets: Path | None
) -> list[str]:
    """Everything under another name first, so that `out` is whole or not there."""
    partial = partial_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix in TORCH_FILE:
            import torch

            with partial.open("xb") as file:
                torch.save({name: its.read() for name, its in tensors.items()}, file)
            said = ["one file of torch.save"]
        else:
            from mics_dtensor.checkpoint.convert.safetensors_folder import write_safetensors

            partial.mkdir()
            files = write_safetensors(partial, tensors, file_bytes=file_bytes)
            said = [
                f"{counted(len(files) - 1, 'file')} of safetensors and {files[-1]}",
                *_copied(assets, partial),
            ]
    except FileExistsError:
        raise CheckpointError(
            f"{partial} is in the way: another conversion writes it, or one was stopped; delete it "
            "if none does"
        ) from None
    except BaseException as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{out} cannot be written: {error}") from error
        raise
    partial.rename(out)
    return said


def _copied(assets: Path | None, folder: Path) -> list[str]:
    """config.json and the tokenizer, which transformers wants beside the weights."""
    found = [path for glob in ASSETS for path in sorted(assets.glob(glob))] if assets else []
    for path in found:
        shutil.copy(path, folder / path.name)
    if not (folder / "config.json").is_file():
        return [
            "without config.json: put the model's own beside them before transformers reads them"
        ]
    return [f"with {', '.join(path.name for path in found)} of {assets}"]

"""`mics convert deepspeed-config ds_config.json`: DeepSpeed's JSON as the TOML of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mics_dtensor.errors import ConfigError
from mics_dtensor.train.deepspeed_config import convert_config, read_deepspeed

SUMMARY = "  deepspeed-config ds_config.json  DeepSpeed's configuration as the TOML of a run"


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="mics convert deepspeed-config",
        description="Prints, or writes, the TOML of a run. Every key of the file is mapped, or "
        "listed below the tables with the reason.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="DeepSpeed's JSON; comments may be in it")
    parser.add_argument(
        "-o", "--out", type=Path, help="TOML file to write; not given, it is printed"
    )
    parser.add_argument("--world-size", type=int, help="ranks, where a batch size depends on them")
    options = parser.parse_args(list(argv))
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size}; give 1 or more")
    found = convert_config(read_deepspeed(options.file), world_size=options.world_size)
    text = found.to_toml(options.file.name)
    if options.out is None:
        return text.rstrip("\n")
    try:
        with options.out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{options.out} exists; name a file that does not") from None
    except OSError as error:
        raise ConfigError(f"{options.out} cannot be written: {error}") from None
    return (
        f"{options.out}: {len(found.values)} keys; {len(found.differs)} of DeepSpeed's are not "
        f"carried over or not the same, {len(found.needless)} have no effect here: both are listed "
        "at its end"
    )

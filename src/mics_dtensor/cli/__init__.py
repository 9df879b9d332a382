"""The command `mics`: one file a subcommand. Errors are one sentence and a status of 2.

That the output takes nothing is one too, of 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper

from mics_dtensor import __version__
from mics_dtensor.cli import convert, explain, measure, plan
from mics_dtensor.errors import MicsError

COMMANDS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "convert": convert.run,
    "explain": explain.run,
    "plan": plan.run,
    "measure": measure.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mics COMMAND ...`; returns the process's status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr does with what it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _done(words)
    except BrokenPipeError:  # `mics ... | head` has read enough
        _drop_output()
        return 0


def _done(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        summaries = [each.SUMMARY for each in (convert, explain, plan, measure)]
        usage = "\n".join([f"usage: mics {{{','.join(COMMANDS)}}} ...", "", *summaries])
        return _print(usage) or (0 if words else 2)
    if words[0] == "--version":
        return _print(f"mics_dtensor {__version__}")
    if words[0] not in COMMANDS:
        print(f"mics: no command {words[0]}; there is {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        said = COMMANDS[words[0]](words[1:])
    except MicsError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank has the same to say
            print(f"mics {words[0]}: {error}", file=sys.stderr)
        return 2
    return _print(said) if said else 0


def _print(said: str) -> int:
    """The process's status: 1 where the output takes nothing."""
    try:
        print(said, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        why = f"what is printed could not be written: {error.strerror}; send it elsewhere"
        print(f"mics: {why}", file=sys.stderr)
        return 1
    return 0


def _drop_output() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python flushes it at exit

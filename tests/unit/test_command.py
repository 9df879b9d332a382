"""The command `mics` itself: what it lists, and what it says of words it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mics_dtensor import __version__
from mics_dtensor.cli import COMMANDS, main
from mics_dtensor.cli.convert import KINDS


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mics_dtensor {__version__}\n"


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in COMMANDS)
    assert main(["convert", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in KINDS)


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export"]) == 2
    assert "no command export; there is convert" in capsys.readouterr().err
    assert main(["convert", "megatron"]) == 2
    assert "convert what? got megatron; there is hf, deepspeed, " in capsys.readouterr().err


def test_a_configuration_is_converted_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mics_dtensor.cli.convert_deepspeed_config import run\n"
        "from mics_dtensor.cli import main\n"
        "assert main(['--version']) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

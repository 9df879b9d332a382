"""docs/library.md has every public name, under the heading order of the contents page."""

import importlib
import re
from pathlib import Path

import mics_dtensor

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
NAMED = re.findall(r"^::: ([\w.]+)$", PAGE, flags=re.MULTILINE)


def test_every_public_name_has_its_place_and_a_docstring() -> None:
    for name in mics_dtensor.__all__:
        its = getattr(mics_dtensor, name)
        assert any(entry in (f"{its.__module__}.{name}", its.__module__) for entry in NAMED), name
        assert len(its.__doc__) > 40, name


def test_what_it_names_exists() -> None:
    for entry in NAMED:
        module, _, name = entry.rpartition(".")
        if module == "mics_dtensor":
            importlib.import_module(entry)
        else:
            assert hasattr(importlib.import_module(module), name), entry


def test_collectives_say_who_must_call() -> None:
    alone = {"Topology", "Layout", "CheckpointOptions", "explain", "MicsError"}
    for name in set(mics_dtensor.__all__) - alone:
        its = getattr(mics_dtensor, name)
        said = (its.__doc__ or "") + (its.__call__.__doc__ or "")
        assert "ollective" in said, name

"""Laws of keys_0_2.toml: no key of torchtitan 0.2.2 is missing, and none changes its default."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mics_dtensor.train.config import config_keys
from mics_dtensor.train.rows import frozen, rows

RELEASED = json.loads((Path(__file__).parent / "torchtitan_0_2_2_keys.json").read_text())
"""Keys and defaults of that release's JobConfig, as its dataclasses hold them."""


def test_every_key_of_the_release_is_a_row() -> None:
    assert {row.key for row in rows().values() if row.since is None} == set(RELEASED)


@pytest.mark.parametrize("name", RELEASED)
def test_a_key_keeps_the_default_of_the_release(name: str) -> None:
    assert rows()[name].default == frozen(RELEASED[name]) == config_keys()[name].default


def test_every_key_of_the_configuration_is_a_row() -> None:
    ours = {name for name in config_keys() if not name.startswith("mics.")}
    assert ours == set(rows())


@pytest.mark.parametrize("row", rows().values(), ids=lambda row: row.key)
def test_a_row_says_one_thing(row: Any) -> None:
    """Mapped, or inert; and whatever is not accepted has a text of refusal."""
    assert (row.to is None) == bool(row.inert)
    assert bool(row.refuse) == (row.accepts is not None or row.inert not in ((), "any"))
    assert all(condition["key"] in config_keys() for condition in row.off_when)
    assert all(set(condition) in ({"key", "is"}, {"key", "lacks"}) for condition in row.off_when)


def test_cuda_graphs_are_off_unless_the_file_says_otherwise() -> None:
    assert config_keys()["training.disable_cuda_graphs"].default is True


def test_the_list_is_that_of_the_release() -> None:
    """Against the release itself, where TORCHTITAN_0_2_2 names its `torchtitan` folder."""
    folder = os.environ.get("TORCHTITAN_0_2_2")
    if folder is None:
        pytest.skip("TORCHTITAN_0_2_2 does not name the folder of torchtitan 0.2.2's sources")
    pytest.importorskip("torchtitan")
    where = Path(folder) / "config" / "job_config.py"
    spec = importlib.util.spec_from_file_location("job_config_of_0_2_2", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
        assert dict(leaves(module.JobConfig())) == RELEASED


def leaves(table: Any, prefix: str = "") -> Any:
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value

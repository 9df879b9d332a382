"""Imports point down, private names of torch have one door, planning needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.architecture import PACKAGE, Module, violations

SRC = Path(__file__).parents[2] / "src"
ALONE = Path(__file__).parents[1] / "harness" / "import_alone.py"
MODULES = [
    Module(
        name=".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"),
        source=path.read_text(encoding="utf-8"),
        is_package=path.name == "__init__.py",
    )
    for path in sorted((SRC / PACKAGE).rglob("*.py"))
]
WITHOUT_TORCH = [
    module.name
    for module in MODULES
    if module.part in ("", "errors", "topology", "layout", "plan")
    and module.name != "mics_dtensor.plan.trace"
]
NEEDS_MORE_THAN_TORCH = ("train", "integrations", "cli")
CORE = [module.name for module in MODULES if module.part not in NEEDS_MORE_THAN_TORCH]


pytestmark = pytest.mark.timeout(330)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_the_house_keeps_its_rules(module: Module) -> None:
    assert violations(module) == []


BAD = {
    # the order
    ("layout", "from .train import load"): "layout may not import train",
    ("layout", "from . import mesh"): "layout may not import mesh",
    ("plan.memory", "from .. import cli"): "plan may not import cli",
    ("plan.memory", "from ..mesh import init_mesh"): "plan may not import mesh",
    ("layout", "from mics_dtensor import train"): "layout may not import train",
    ("layout", "import mics_dtensor.train"): "layout may not import train",
    ("layout", "import mics_dtensor.train.load as load"): "layout may not import train",
    ("layout", "def f():\n    from mics_dtensor.train.load import x"): "may not import train",
    ("layout", "if TYPE_CHECKING:\n    from mics_dtensor.mesh import x"): "may not import mesh",
    ("layout", "import_module('mics_dtensor.train')"): "layout may not import train",
    ("errors", "from mics_dtensor.upstream import x"): "errors may not import upstream",
    ("mesh", "from mics_dtensor.plan.traffic import x"): "mesh may not import plan",
    ("collectives", "from mics_dtensor import audit"): "collectives may not import audit",
    ("collectives", "from mics_dtensor import apply_mics"): "not a module of the order",
    ("train.trainer", "from mics_dtensor import cli"): "train may not import cli",
    ("layout", "import mics_dtensor"): "not a module of the order",
    ("utils", ""): "utils has no place in the order",
    # private names
    ("mesh", "import torch._C"): "private name imported: torch._C",
    ("mesh", "from torch import _C"): "private name imported: torch._C",
    ("mesh", "from torch.distributed.fsdp._fully_shard import x"): "private name imported",
    ("mesh", "from torch.distributed.fsdp import _fully_shard as f"): "private name imported",
    ("mesh", "from mics_dtensor.layout import _stride"): "private name imported",
    ("train.trainer", "from torchtitan.trainer import _x"): "private name imported",
    ("apply", "module._get_fsdp_state()"): "private name touched: module._get_fsdp_state",
    ("apply", "group._all_reduce_hook = None"): "private name touched: group._all_reduce_hook",
    ("apply", "import torch\ntorch._C._x()"): "private name touched: torch._C",
    ("apply", "a(b)[0].c._state"): "private name touched",
    ("apply", "getattr(module, '_state')"): "private name touched: getattr(module, '_state')",
    ("apply", "setattr(p, '_mics', 1)"): "private name touched",
    ("apply", "attrgetter('a._b')(x)"): "private name touched",
    ("apply", "class Ours(Theirs):\n    def f(self):\n        self._theirs()"): "self._theirs",
    ("apply", "def _state(): ...\nmodule._state"): "private name touched: module._state",
    ("train.trainer", "self._x"): "private name touched",
    ("apply", "import torchtitan.trainer"): "torchtitan outside train/",
    # groups
    ("apply", "dist.new_group([0])"): "a process group is made outside mesh.py: new_group",
    ("apply", "from torch.distributed import new_group as n"): "made outside mesh.py: new_group",
    ("apply", "make = dist.split_group"): "made outside mesh.py: split_group",
    ("apply", "init_device_mesh('cpu', (2,))"): "made outside mesh.py: init_device_mesh",
    ("apply", "DeviceMesh('cpu', [0, 1])"): "a mesh is made outside mesh.py",
    ("apply", "DeviceMesh.from_group(g, 'cpu')"): "made outside mesh.py: from_group",
    ("train.trainer", "dist.new_group([0])"): "made outside mesh.py: new_group",
    ("replicas", "dist.init_process_group('gloo')"): "made outside mesh.py: init_process_group",
    # the environment and logging
    ("topology", "import os\nos.environ['X']"): "the environment is read",
    ("topology", "from os import environ"): "the environment is read",
    ("topology", "import os\nos.getenv('X')"): "the environment is read",
    ("apply", "logging.basicConfig()"): "the root logger is used",
    ("apply", "logging.info('x')"): "the root logger is used",
    ("apply", "logging.config.dictConfig({})"): "the root logger is used",
    ("apply", "from logging import basicConfig"): "the root logger is used",
    ("apply", "logging.getLogger()"): "the root logger is used",
    ("apply", "logger.setLevel(10)"): "logging is configured",
    ("apply", "logger.propagate = False"): "logging is configured",
    # length
    ("apply", "\n" * 301): "more than 300 lines",
}


@pytest.mark.parametrize(("where", "source"), BAD, ids=repr)
def test_each_breach_is_caught(where: str, source: str) -> None:
    found = violations(Module(f"mics_dtensor.{where}", source))
    assert any(BAD[where, source] in said for said in found), found


GOOD = [
    ("layout", "from mics_dtensor.topology import Topology\nfrom .errors import ConfigError"),
    ("plan.memory", "from mics_dtensor.plan.traffic import x\nfrom . import traffic"),
    ("train.trainer", "from torchtitan.trainer import Trainer\nfrom mics_dtensor.apply import x"),
    ("train.trainer", "import os\nos.environ['RANK']\nlogging.basicConfig()"),
    ("train.trainer", "dist.init_process_group('gloo')"),
    ("train.trainer", "from mics_dtensor import Layout, apply_mics"),
    ("train.device_shim", "from torchtitan.tools import _x\nx._y"),
    ("upstream", "from torch.distributed.fsdp._fully_shard import x\nx._get_fsdp_state()"),
    ("mesh", "init_device_mesh('cpu', (2,))\ndist.new_group([0])\nDeviceMesh('cpu', [0])"),
    ("apply", "def f(mesh: DeviceMesh) -> DeviceMesh: ..."),
    ("apply", "logger = logging.getLogger(__name__)\nlogger.info('x')\nself.config.debug"),
    ("apply", "class A:\n    _x: int\n    def __eq__(self, other):\n        other._x == self._x"),
    (
        "apply",
        "class A:\n    def f(self):\n        self._y = 1\n        self._g()\n    def _g(self): ...",
    ),
    ("apply", "row._replace(a=1)\ntype(x).__name__\ngetattr(x, 'public')"),
]


@pytest.mark.parametrize(("where", "source"), GOOD, ids=repr)
def test_what_is_allowed_passes(where: str, source: str) -> None:
    assert violations(Module(f"mics_dtensor.{where}", source)) == []


def run_python(*arguments: str, source: Path = SRC) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds the package in `source`."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(source), "KEY_READ": "1"},
        capture_output=True,
        text=True,
        timeout=300,  # seconds where the machine is busy with other things
        check=False,
    )


NO_TORCH = """
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchtitan", "numpy"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_planning_imports_where_torch_cannot_be_imported() -> None:
    done = run_python("-c", NO_TORCH, *WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr


def test_an_import_of_torch_in_planning_is_caught(tmp_path: Path) -> None:
    planted = plant(tmp_path, "import torch.distributed")
    done = run_python("-c", NO_TORCH, "mics_dtensor.planted", source=planted)
    assert "torch was imported" in done.stderr


SILENT = {"reads": [], "logs": [], "root_logger_changed": False}


def test_the_core_imports_with_torch_alone_and_in_silence() -> None:
    done = run_python(str(ALONE), *CORE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == SILENT


TALKATIVE = """
import logging, os
from os import environ
environ["KEY_READ"]
environ.get("KEY_GOT")
os.getenv("KEY_GETENV")
"KEY_ASKED" in environ
list(environ)
logging.getLogger("planted").debug("hello")
logging.basicConfig()
"""


def test_what_a_core_does_at_import_is_seen(tmp_path: Path) -> None:
    done = run_python(str(ALONE), "mics_dtensor.planted", source=plant(tmp_path, TALKATIVE))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "reads": ["KEY_ASKED", "KEY_GETENV", "KEY_GOT", "KEY_READ", "all of it"],
        "logs": ["hello"],
        "root_logger_changed": True,
    }


def test_other_libraries_are_hidden_from_the_core(tmp_path: Path) -> None:
    planted = plant(tmp_path, "import torch\nimport numpy")
    done = run_python(str(ALONE), "mics_dtensor.planted", source=planted)
    assert "numpy is hidden: only torch is installed" in done.stderr


def plant(folder: Path, source: str) -> Path:
    """A package of our name with one module, `planted`."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "planted.py").write_text(source)
    return folder

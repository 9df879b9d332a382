"""Run as a program: import the modules that are named, where nothing but torch can be imported.

Prints one JSON object: which environment variables our files read, what they logged, and whether
the root logger changed, while they were imported and every name of the contents page was loaded.
"""

import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from types import FrameType

OURS = f"{os.sep}mics_dtensor{os.sep}"
reads: list[str] = []
logs: list[str] = []


def required_by_torch() -> set[str]:
    """The distributions that torch needs, itself included, without their extras."""
    wanted, seen = ["torch"], set[str]()
    while wanted:
        name = _normal(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wanted += [_name(line) for line in requires if "extra ==" not in line]
    return seen


def hidden_modules() -> set[str]:
    """The top-level modules of all other distributions."""
    visible = required_by_torch()
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if module not in SEEN and not visible & {_normal(owner) for owner in owners}
    }


class TorchAlone:
    """A finder, first in line, that hides those modules."""

    def __init__(self) -> None:
        self.hidden = hidden_modules()

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"{name} is hidden: only torch is installed", name=name)


class WatchedEnvironment(type(os.environ)):
    """os.environ, noting what our own files read."""

    def __getitem__(self, key: str) -> str:
        _note(key, sys._getframe(1))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        _note(str(key), sys._getframe(1))
        return super().__contains__(key)

    def get(self, key: str, default: str | None = None) -> str | None:
        _note(key, sys._getframe(1))
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        _note("all of it", sys._getframe(1))
        return super().__iter__()


def _is_ours(path: str) -> bool:
    # A clone is a folder of the package's name too, and may hold the environment.
    return OURS in path and f"{os.sep}site-packages{os.sep}" not in path


# torch 2.14 asks for spmd_types with find_spec, which a finder that raises would break.
SEEN = ("mics_dtensor", "spmd_types")
STEPS_BETWEEN = (__file__, os.__file__, "<frozen os>", "<frozen _collections_abc>")


def _note(key: str, frame: FrameType | None) -> None:
    while frame and frame.f_code.co_filename in STEPS_BETWEEN:
        frame = frame.f_back
    if frame and _is_ours(frame.f_code.co_filename):
        reads.append(key)


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    if _is_ours(record.pathname) or logger.name.startswith("mics_dtensor"):
        logs.append(record.getMessage())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def main() -> None:
    os.environ.__class__ = WatchedEnvironment
    logging.Logger.handle = _handle
    logging.Logger.isEnabledFor = lambda self, level: True  # noqa: ARG005
    sys.meta_path.insert(0, TorchAlone())
    root_logger = (list(logging.root.handlers), logging.root.level)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    contents = importlib.import_module("mics_dtensor")
    for name in getattr(contents, "__all__", []):
        getattr(contents, name)
    changed = root_logger != (list(logging.root.handlers), logging.root.level)
    print(json.dumps({"reads": sorted(set(reads)), "logs": logs, "root_logger_changed": changed}))


if __name__ == "__main__":
    main()

"""The rules of the house that a machine can hold us to: what a file may import, touch and make."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

PACKAGE = "mics_dtensor"
# A file imports only from lines above its own; siblings inside one package excepted.
ORDER = (
    ("errors", "upstream"),
    ("topology", "world", "parts"),
    ("layout",),
    ("plan", "mesh", "stage"),
    ("gloo",),
    ("collectives",),
    ("slices",),
    ("gradient", "agreement", "slots"),
    ("bucket",),
    ("boundary", "audit", "accumulation_arguments"),
    ("accumulate", "apply", "replicas"),
    ("clip", "explanation", "masters", "measure", "optimizer_arguments"),
    ("sharded_states",),
    ("checkpoint",),
    ("train", "integrations"),
    ("cli",),
)
USES_THE_CONTENTS_PAGE = ("train", "cli")
LINE = {part: line for line, parts in enumerate(ORDER) for part in parts}

UPSTREAM = {"torch", "torchtitan", "torchdata", "torch_checkpointing"}
MAY_TOUCH_PRIVATE_NAMES = (
    "mics_dtensor.upstream",
    "mics_dtensor.train.device_shim",
    "mics_dtensor.integrations.transformers",  # its own `_no_split_modules`, for one
)
PUBLIC_IN_SPITE_OF_THE_UNDERSCORE = {"_asdict", "_fields", "_make", "_replace"}  # namedtuple
GROUP_MAKERS = {
    "init_device_mesh",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "from_group",
}
ROOT_LOGGER = {"basicConfig", "captureWarnings", "dictConfig", "disable", "fileConfig", "root"} | {
    "debug",
    "info",
    "warning",
    "error",
    "exception",
    "critical",
    "log",
}
LOGGING_MODULES = ("logging", "logging.config")
LOGGER_SETTINGS = {"addHandler", "addFilter", "propagate", "setLevel"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, whether it is the `__init__` of a package, and its text."""

    name: str
    source: str
    is_package: bool = False

    @property
    def part(self) -> str:
        """Its place in the order: "layout", "train"; empty for the contents page."""
        return part_of(self.name)


@dataclass(frozen=True)
class Reference:
    """A module or name that an import statement reaches, e.g. "mics_dtensor.train.load"."""

    line: int
    target: str


def part_of(name: str) -> str:
    """The part of the package that a dotted name lies in."""
    return ".".join(name.split(".")[1:2])


def violations(module: Module) -> list[str]:
    """Each breach of the rules in `module`, as "line: what"."""
    tree = ast.parse(module.source)
    imported = list(imports(module, tree))
    found = [*_order(module, imported), *_upstream(module, imported)]
    found += [*_private(module, tree), *_groups(module, tree), *_surroundings(module, tree)]
    if (num_lines := len(module.source.splitlines())) > 300:
        found.append(f"{num_lines}: more than 300 lines")
    return found


def imports(module: Module, tree: ast.AST) -> Iterator[Reference]:
    """What the module imports at any depth; relative imports resolved, `import_module` too."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Reference(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            for alias in node.names:
                yield Reference(node.lineno, ".".join([*base, alias.name]))
        elif isinstance(node, ast.Call) and _last(node.func) in ("import_module", "__import__"):
            for name in _strings(node.args[:1]):
                yield Reference(node.lineno, name)


def _order(module: Module, imported: list[Reference]) -> Iterator[str]:
    if not module.part:
        return  # the contents page names everything
    if module.part not in LINE:
        yield f"1: {module.part} has no place in the order"
        return
    for reference in imported:
        if reference.target.split(".")[0] != PACKAGE:
            continue
        part = part_of(reference.target)
        if part not in LINE and module.part in USES_THE_CONTENTS_PAGE:
            continue  # a name of the library's public interface, as its users import it
        if part not in LINE:
            yield (
                f"{reference.line}: {reference.target} is not a module of the order: "
                "import from the module that defines it"
            )
        elif part != module.part and LINE[part] >= LINE[module.part]:
            yield f"{reference.line}: {module.part} may not import {part}"


def _upstream(module: Module, imported: list[Reference]) -> Iterator[str]:
    for reference in imported:
        root, *rest = reference.target.split(".")
        if root == "torchtitan" and module.part != "train":
            yield f"{reference.line}: torchtitan outside train/"
        may = root in UPSTREAM and module.name.startswith(MAY_TOUCH_PRIVATE_NAMES)
        if root in UPSTREAM | {PACKAGE} and not may and any(map(_is_private, rest)):
            yield f"{reference.line}: private name imported: {reference.target}"


def _private(module: Module, tree: ast.AST) -> Iterator[str]:
    """`x._name` is ours only if a class of this very file defines `_name`, whatever x is called.

    So `self._name` inherited from a class of torch is refused, and `other._name` beside a
    `self._name` of our own is not.
    """
    if module.name.startswith(MAY_TOUCH_PRIVATE_NAMES):
        return
    allowed = PUBLIC_IN_SPITE_OF_THE_UNDERSCORE | set(_own_private_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and _last(node.func) in BY_NAME:
            names = [part for name in _strings(node.args) for part in name.split(".")]
        else:
            continue
        for name in names:
            if _is_private(name) and name not in allowed:
                yield f"{node.lineno}: private name touched: {ast.unparse(node)}"


def _own_private_names(tree: ast.AST) -> Iterator[str]:
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        for node in ast.walk(owner):
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if stored and ast.unparse(node.value) in ("self", "cls"):
                yield node.attr


def _groups(module: Module, tree: ast.AST) -> Iterator[str]:
    """Only mesh.py makes process groups; the programs may start the world itself."""
    if module.part == "mesh":
        return
    makers = (
        GROUP_MAKERS if module.part in ("train", "cli") else GROUP_MAKERS | {"init_process_group"}
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last(node.func) == "DeviceMesh":
            yield f"{node.lineno}: a mesh is made outside mesh.py: {ast.unparse(node)}"
        for name in _names(node):
            if name in makers:
                line = getattr(node, "lineno", 1)
                yield f"{line}: a process group is made outside mesh.py: {name}"


def _surroundings(module: Module, tree: ast.AST) -> Iterator[str]:
    """Only train/ and cli/ read the environment or configure logging."""
    if module.part in ("train", "cli"):
        return
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for name in _names(node):
            if name in ENVIRONMENT:
                yield f"{line}: the environment is read outside train/ and cli/: {name}"
            if name in LOGGER_SETTINGS:
                yield f"{line}: logging is configured outside train/ and cli/: {name}"
        used = set[str]()
        if isinstance(node, ast.Attribute) and node.attr in ROOT_LOGGER:
            used = {node.attr} if ast.unparse(node.value) in LOGGING_MODULES else used
        elif isinstance(node, ast.ImportFrom) and node.module in LOGGING_MODULES:
            used = set(_names(node)) & ROOT_LOGGER
        elif isinstance(node, ast.Call) and _last(node.func) == "getLogger" and not node.args:
            used = {"getLogger()"}
        for name in used:
            yield f"{line}: the root logger is used outside train/ and cli/: {name}"


def _names(node: ast.AST) -> list[str]:
    """The identifiers that a node itself speaks of."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and _last(node.func) in BY_NAME:
        return list(_strings(node.args))
    return []


def _last(node: ast.expr) -> str:
    """The last identifier of a dotted expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))

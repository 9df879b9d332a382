"""The errors that the source can raise, in its own words: what the pages quote and list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "mics_dtensor"
TROUBLESHOOTING = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
ERRORS = re.compile(r"(?!AttributeError)\w+Error$")


def quoted() -> list[str]:
    """The headings of docs/troubleshooting.md, each a piece of a message."""
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    return re.findall(r"^#### `(.*)`$", text, flags=re.MULTILINE)


def says(message: str, piece: str) -> bool:
    """Whether a message holds a quoted piece, values (`...`) apart."""
    wanted = ".*?".join(re.escape(part) for part in piece.split("..."))
    return re.search(wanted, message, flags=re.DOTALL) is not None


def texts(tree: ast.AST) -> list[str]:
    """Every string of a file, `...` where a value goes in."""
    return [
        words(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def raised(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The errors that are raised with words, as (class, words)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if ERRORS.match(name) and node.args and (text := words(node.args[0])).strip(" ."):
                yield name, " ".join(text.split())


def words(node: ast.expr) -> str:
    """A string of the source, with `...` where a value goes in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (words(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    return "..."


def by_file() -> dict[str, list[tuple[str, str]]]:
    """All that is raised, each once, by the file that raises it."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        its = list(dict.fromkeys(raised(ast.parse(path.read_text(encoding="utf-8")))))
        if its:
            found[str(path.relative_to(SOURCE))] = its
    return found


def page(anchors: Sequence[str]) -> str:
    """The page that lists them; `anchors` are those of the headings of `quoted`, in order."""
    lines = [
        "# All error messages",
        "",
        "Made from the source. `...` stands for what was given; most say in their second half what "
        "works. Those with a link are told in full under [troubleshooting](troubleshooting.md).",
    ]
    told = dict(zip(quoted(), anchors, strict=True))
    for file, messages in by_file().items():
        lines += ["", f"## `{file}`", ""]
        for error, text in messages:
            piece = next((piece for piece in told if says(text, piece)), None)
            more = f" ([what to do](troubleshooting.md#{told[piece]}))" if piece else ""
            lines.append(f"* **{error}**: {_escaped(text)}{more}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text)

"""Pages of the site that are made while it is built: a hook of mkdocs (mkdocs.yml).

A page of docs/ may link to any file of the repository, as it would on a code host
(`../examples/01_add_to_fsdp2.py`): the file becomes a page. `messages.md` lists every error that
the source can raise, with its words.
"""

from __future__ import annotations

import ast
import os.path
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mics_dtensor"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml"}
OWN_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ERRORS = re.compile(r"(?!AttributeError)\w+Error$")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, the files that those link to, and the messages."""
    wanted = [
        (file.src_uri, (ROOT / "docs" / file.src_uri).read_text("utf-8"))
        for file in files.documentation_pages()
    ]
    seen = set[str]()
    for name in OWN_PAGES:
        wanted.append((f"../{name}", ""))
        _add(name, files, config, wanted, seen)
    while wanted:
        page, text = wanted.pop()
        for target in LINK.findall(text):
            _add(_in_repository(page, target), files, config, wanted, seen)
    files.append(File.generated(config, "messages.md", content=messages_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links out of docs/ go to the pages that `on_files` has made."""
    here = page.file.src_uri
    origin = ORIGIN.get(here, f"docs/{here}")
    if not origin.endswith(".md"):
        return markdown  # a listing

    def inside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        if origin.startswith("docs/") and target.startswith("docs/"):
            return match[1]
        uri = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return posixpath.relpath(uri, posixpath.dirname(here) or ".")

    return LINK.sub(inside, markdown)


ORIGIN: dict[str, str] = {}
"""Of a page that was made from a file of the repository: that file."""


def _page_of(name: str) -> str:
    return OWN_PAGES.get(name, f"files/{name}" if name.endswith(".md") else f"files/{name}.md")


def _in_repository(page: str, target: str) -> str:
    origin = ORIGIN.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _add(
    name: str, files: Files, config: MkDocsConfig, wanted: list[tuple[str, str]], seen: set[str]
) -> None:
    if name.startswith(("docs/", "..")) or name in seen or not (ROOT / name).is_file():
        return  # a page already, or a broken link, which mkdocs reports
    seen.add(name)
    text = (ROOT / name).read_text("utf-8")
    uri = _page_of(name)
    ORIGIN[uri] = name
    if name.endswith(".md"):
        wanted.append((uri, text))
    else:
        language = LANGUAGES.get(os.path.splitext(name)[1], "")
        text = f"---\nhide: [toc]\n---\n\n# {name}\n\n````{language}\n{text}````\n"
    files.append(File.generated(config, uri, content=text))


def messages_page() -> str:
    """Every `raise SomeError("...")` of the source, by the part of the library that raises it."""
    lines = [
        "# All error messages",
        "",
        "Made from the source. `...` stands for what was given. "
        "What to do about those that people meet is in [troubleshooting](troubleshooting.md).",
    ]
    for path in sorted(SOURCE.rglob("*.py")):
        found = list(messages(ast.parse(path.read_text("utf-8"))))
        if found:
            lines += ["", f"## `{path.relative_to(SOURCE)}`", ""]
            lines += [f"* **{error}**: {_escaped(text)}" for error, text in dict.fromkeys(found)]
    return "\n".join(lines) + "\n"


def messages(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The errors that are raised with words, as (class, words)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if ERRORS.match(name) and node.args and (text := words(node.args[0])).strip(" ."):
                yield name, text


def words(node: Any) -> str:
    """A string of the source, with `...` where a value goes in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            words(part) if isinstance(part, ast.Constant) else "..." for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    return "..."


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text)

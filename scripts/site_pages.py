"""Pages of the site that are made while it is built: a hook of mkdocs (mkdocs.yml).

A page of docs/ may link to any file of the repository, as it would on a code host
(`../examples/01_add_to_fsdp2.py`): the file becomes a page. `messages.md` lists every error that
the source can raise, with its words.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from pathlib import Path
from typing import Any

import messages  # beside this file, where mkdocs looks for what a hook imports
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml"}
OWN_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


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
    anchors = [slugify(piece, "-") for piece in messages.quoted()]
    files.append(File.generated(config, "messages.md", content=messages.page(anchors)))
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

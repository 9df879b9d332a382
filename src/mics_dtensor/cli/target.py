"""A file that is to be written: why it cannot be, told before there is anything to lose."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(path: Path) -> str | None:
    """What stands in the way, and what would work; None: nothing that can be seen beforehand."""
    if path.is_dir():
        return f"{path} is a folder; give a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} for {path}; make it, or give another file"
    if not path.exists():
        if os.access(path.parent, os.W_OK):
            return None
        return f"{path.parent} lets nobody make {path.name} there; give a file in another folder"
    mode = path.stat().st_mode & 0o777
    if mode & 0o222 and os.access(path, os.W_OK):  # root may write what is meant to stay
        return None
    return f"{path} is not to be written (mode {mode:o}); chmod u+w {path}, or give another file"

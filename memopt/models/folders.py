"""The folder in which memopt keeps files of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def default_directory() -> Path:
    """MEMOPT_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("MEMOPT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memopt"


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the oldest JSON files of a folder beyond so many, and their locks. Other processes may
    do so at once."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - most)]:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)

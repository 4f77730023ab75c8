"""The folder in which memopt keeps its own files."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

_LOG = logging.getLogger(__name__)
_TOLD: set[Path] = set()

UNFINISHED = ".memopt-"
"""Prefix of the name of a file that is being written, to replace another one."""
_ABANDONED_S = 24 * 3600.0
_NO_LINE_ENDS = getattr(os, "O_BINARY", 0)


def default_directory() -> Path:
    """Return MEMOPT_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("MEMOPT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memopt"


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a temporary file beside the path, then rename it: no reader sees it half-written, and
    an interrupt leaves what was there. A link stays a link, and its target is written; a pipe or
    a device is written as it is.

    Raises:
        OSError: it is a folder, or its folder does not exist or cannot be written.
    """
    named, target = Path(path), Path(os.path.realpath(path))
    if named.exists() and not named.is_file():
        named.write_bytes(data)
        return
    # Its name is known before it is created, so that it can be removed after any interrupt.
    beside = target.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINE_ENDS, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def tell_once(what: str, path: Path, doing: str, error: Exception) -> None:
    """Warn, once for each place, that a file kept for later cannot be used: a full or read-only
    disk must not stop a plan."""
    if path not in _TOLD:
        _TOLD.add(path)
        _LOG.warning("the %s %s cannot be %s: %s", what, path, doing, error)


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the oldest JSON files of a folder beyond `most`, with their locks, and files that
    killed processes have left half-written. Other processes may do so at once."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - most)]:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
    for path in [one for one in folder.iterdir() if one.name.startswith(UNFINISHED)]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()

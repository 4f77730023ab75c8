"""The folder in which memopt keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def default_directory() -> Path:
    """MEMOPT_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("MEMOPT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memopt"

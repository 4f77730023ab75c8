"""The browser of this machine, and a page of a report opened in it."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """The path of an installed Chromium or Chrome.

    Raises:
        RuntimeError: there is none; says how to get one.
    """
    named = os.environ.get("MEMOPT_CHROMIUM")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise RuntimeError(
            "no Chromium or Chrome on the path: install one (Debian: apt-get install chromium) or "
            "set MEMOPT_CHROMIUM to its path"
        )
    return found

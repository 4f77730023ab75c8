"""Handling an installed torchvision that cannot be imported, such as one for another torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "torchvision"
REMEDY = (
    "install the build that belongs to your torch (pip install torchvision from the index that "
    "torch came from, such as https://download.pytorch.org/whl/cpu), or pip uninstall torchvision"
)


def torchvision_fault() -> str | None:
    """Say why the installed torchvision cannot be imported; None if it can or is not installed."""
    if importlib.util.find_spec(NAME) is None:
        return None
    try:
        importlib.import_module(NAME)
    except (ImportError, RuntimeError, OSError) as error:
        # RuntimeError: its Python registers kernels for compiled operators that did not load.
        return " ".join(str(error).split())
    return None


@contextmanager
def without_broken_torchvision() -> Iterator[str | None]:
    """Make a torchvision that cannot be imported count as not installed inside.

    transformers asks only whether torchvision is installed, imports it even for text models, and
    fails. Yields why torchvision cannot be imported; None if it can.
    """
    fault = torchvision_fault()
    if fault is None:
        yield None
        return
    # None in sys.modules is the import system's way to say that a module does not exist.
    sys.modules[NAME] = None  # type: ignore[assignment]
    try:
        yield fault
    finally:
        del sys.modules[NAME]

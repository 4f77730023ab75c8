"""Switches planning of wrapped models off for a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

_HERE = threading.local()
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def runs_unplanned() -> bool:
    """Return whether wrapped models that this thread calls now run without a plan."""
    return getattr(_HERE, "running", False)


def passes_on(model: nn.Module) -> bool:
    """Return whether a call of the model runs as it is, since this thread runs without plans or
    since it is a call of a method: Lightning sends `training_step` through the forward of what is
    around the model, such as DistributedDataParallel. What that calls is planned."""
    if runs_unplanned():
        return True
    forward = model.__dict__.get("forward")
    package = getattr(forward, "__module__", "").partition(".")[0]
    named = getattr(forward, "__qualname__", "")
    return package in _LIGHTNING and named.endswith(".wrapped_forward")


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Run wrapped models without a plan in the block, as within a planned call of another."""
    before = runs_unplanned()
    _HERE.running = True
    try:
        yield
    finally:
        _HERE.running = before

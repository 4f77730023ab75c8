"""Autocast's state: named for records and messages, entered again, and switched off."""

from __future__ import annotations

import contextlib

import torch

from memopt.models.record import AUTOCAST_DEVICES


def autocast_state() -> tuple[str | None, ...]:
    """The dtype of autocast on cpu and cuda as it is here and now; None: off."""
    return tuple(
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind)
        else None
        for kind in AUTOCAST_DEVICES
    )


def autocast_off() -> contextlib.ExitStack:
    """A context without autocast: the casts are in the graph, so kernels run as they are, even
    where the user calls them under autocast."""
    return autocast_as((None,) * len(AUTOCAST_DEVICES))


def autocast_as(state: tuple[str | None, ...]) -> contextlib.ExitStack:
    """A context with autocast as it was when `autocast_state()` said `state`."""
    stack = contextlib.ExitStack()
    for kind, wanted, found in zip(AUTOCAST_DEVICES, state, autocast_state(), strict=True):
        if wanted is not None and wanted != found:
            stack.enter_context(torch.autocast(kind, getattr(torch, wanted)))
        elif wanted is None and found is not None:
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack

"""What a planned module does with a call that is not the planned one, if not an error."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from memopt.errors import GuardError
from memopt.executor.module import OnMismatch, PlannedModule
from memopt.profiler.inputs import Call

_LOG = logging.getLogger(__name__)

CHOICES = ("error", "original", "replan")


def behaviour(choice: str, replan: Callable[[nn.Module, Call], nn.Module]) -> OnMismatch | None:
    """The behaviour of a name.

    Args:
        choice: "error" raises GuardError; "original" runs the unplanned model; "replan" plans
            once for each kind of call and runs that.
        replan: makes a planned module for a model and a call.

    Raises:
        ValueError: an unknown name.
    """
    if choice not in CHOICES:
        raise ValueError(f"otherwise= is one of {', '.join(map(repr, CHOICES))}, got {choice!r}")
    if choice == "error":
        return None
    if choice == "original":
        return _original
    return _Replanning(replan)


def _original(model: nn.Module, _call: Call, error: GuardError) -> nn.Module:
    _LOG.info("running the original module: %s", error)
    return model


class _Replanning:
    """Plans made so far for other calls, to be used again."""

    def __init__(self, replan: Callable[[nn.Module, Call], nn.Module]) -> None:
        self._replan = replan
        self._known: list[PlannedModule] = []

    def __call__(self, model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        for known in self._known:
            if known.original is model and known.accepts(call):
                return known
        _LOG.info("planning again: %s", error)
        fresh = self._replan(model, call)
        assert isinstance(fresh, PlannedModule)
        self._known.append(fresh)
        return fresh

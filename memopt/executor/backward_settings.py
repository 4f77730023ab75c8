"""Warns of a backward under settings of torch that make a planned backward differ from eager's:
autocast, which would cast in eager's, and dispatch modes and kernel settings that differ from the
forward's, under which the plan recomputes activations."""

from __future__ import annotations

from typing import Any

import torch

from memopt.models.warned import warn
from memopt.step.backend import autocast_state
from memopt.step.captured import Captured
from memopt.step.casts import backward_would_cast
from memopt.step.loss import differentiable
from memopt.step.numerics import KernelSettings
from memopt.torch_private.modes import nobody_looks_on
from memopt.user_code.aside import mode_around


class BackwardSettings:
    """Compares the settings under which the backwards of a captured model's calls run with those of
    their forwards, and warns once of each kind of difference."""

    def __init__(self, captured: Captured) -> None:
        self._casts = backward_would_cast(captured.module)
        self._settings = KernelSettings(captured.device or torch.device("cpu"))
        self._compares = True

    def follow(self, output: Any) -> None:
        """Check autocast when the backward of this output begins, if the call was under autocast.
        (AOTAutograd ends autocast before it calls the planned backward.)"""
        if self._casts and any(autocast_state()):
            for value in differentiable(output).values():
                value.register_hook(lambda _gradient: self._look_for_casts())  # type: ignore[no-untyped-call]

    def now(self, recomputes: bool) -> tuple[Any, ...]:
        """Return a forward's settings, for `look`; () if its backward recomputes nothing."""
        return self._settings.read() if recomputes and self._compares else ()

    def look(self, before: tuple[Any, ...]) -> None:
        """Compare the settings when a backward begins with its forward's."""
        self._look_for_casts()
        if before and not nobody_looks_on() and (mode := mode_around()):
            self._compares = False
            warn(
                f"{mode} is active around backward(): it sees what the plan computes again there, "
                "too, and gradients can differ where it changes what operators return. Train "
                "without a plan under it (memopt.unwrap(model), or planned.original)"
            )
        elif before and (other := self._settings.difference(before)):
            self._compares = False
            warn(
                f"{other}: what the plan computes again in the backward runs by other kernels than "
                "in the forward, and gradients can differ in their last bits. Call backward() "
                "under the forward's settings",
            )

    def _look_for_casts(self) -> None:
        if self._casts and any(autocast_state()):
            self._casts = False
            warn(
                "backward() was called inside torch.autocast, where eager's backward casts some "
                "operators to the lower precision; a planned backward computes them in float32, as "
                "eager's does after the `with`: gradients differ in their last bits. Call "
                "backward() after the `with`, as torch advises",
            )

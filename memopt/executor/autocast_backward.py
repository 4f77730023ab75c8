"""Warns of a backward under autocast, which casts what an unplanned one computes."""

from __future__ import annotations

from typing import Any

import torch

from memopt.models.warned import warn
from memopt.step.backend import autocast_state
from memopt.step.captured import Captured
from memopt.step.casts import backward_would_cast
from memopt.step.loss import differentiable


class AutocastBackward:
    """Looks whether the backward of a captured model's calls runs under autocast."""

    def __init__(self, captured: Captured) -> None:
        self._casts = backward_would_cast(captured.module)

    def look(self, output: Any) -> None:
        """Look when the backward of a call's output begins."""
        if self._casts and any(autocast_state()):
            for value in differentiable(output).values():
                value.register_hook(self._begun)  # type: ignore[no-untyped-call]

    def _begun(self, _gradient: torch.Tensor) -> None:
        """Warn, once, of a backward under autocast; the planned one itself runs without."""
        if self._casts and any(autocast_state()):
            self._casts = False
            warn(
                "backward() was called inside torch.autocast, which casts what the backward "
                "computes in float32; a planned one computes it in float32, as after the `with`: "
                "gradients differ in their last bits. Call backward() after it, as torch advises",
            )

"""Warns where hooks on gradients draw random numbers, and their order may not be eager's
(`memopt.executor.hook_order`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memopt.executor.random_state import RandomStates
from memopt.models.warned import warn
from memopt.torch_private.modes import backward_number, when_backward_is_over
from memopt.torch_private.tensors import has_gradient_hooks


class DrawingHooks:
    """Checks the 1st, 2nd, 4th, 8th... backward of a captured model, until it has warned.

    Args:
        device: the device whose generator is compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._random, self._backwards, self._told = RandomStates(device), 0, False

    def look(self, values: Sequence[Any]) -> None:
        """Check whether hooks on the gradients of these values draw random numbers, once their node
        returns."""
        self._backwards += 1
        if self._told or self._backwards & (self._backwards - 1) or backward_number() == -1:
            return
        hooked = (isinstance(one, torch.Tensor) and has_gradient_hooks(one) for one in values)
        if sum(hooked) > 1:
            when_backward_is_over(partial(self._over, self._random.now()))

    def _over(self, before: bytearray) -> None:
        if self._told or self._random.now() == before:
            return
        self._told = True
        warn(
            "hooks on gradients draw random numbers: with a plan they are called in another order "
            "than without one, and each gets other numbers. For the numbers that an unplanned step "
            "draws add them after backward(), parameter by parameter, or draw from a "
            "torch.Generator for each parameter; this is said once",
        )

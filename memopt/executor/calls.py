"""How calls of a wrapped or planned model ran, and what is said of those without a plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import nn


def has_own(model: nn.Module, name: str) -> bool:
    """Whether an attribute of this name is the model's own, not one that `memopt.wrap` gave it."""
    try:
        return not isinstance(getattr(model, name), Calls)
    except AttributeError:
        return False


@dataclass
class Calls:
    """How many calls of a planned module ran in which way.

    Attributes:
        planned: under the plan.
        original: by the unplanned model: evaluation, and with `otherwise="original"` calls that
            were not planned.
        replanned: under another plan, with `otherwise="replan"`.
    """

    planned: int = 0
    original: int = 0
    replanned: int = 0
    _warned: bool = field(default=False, repr=False, compare=False)
    _differentiated: bool = field(default=False, repr=False, compare=False)

    def fall_back(self, model: nn.Module, reason: str) -> None:
        """Count a call of the unplanned model; warn when it is the first training step.

        Args:
            model: the unplanned model.
            reason: why the plan does not run, for people.
        """
        self.original += 1
        if self._warned or not torch.is_grad_enabled():
            return
        if any(module.training for module in model.modules()):
            self._warned = True
            warnings.warn(
                f"a training step ran without its plan: {reason}. The planned module's .calls "
                "counts how its calls ran; this is said once",
                stacklevel=5,
            )

    def take_back(self) -> None:
        """Count a planned call as one of the unplanned model, which runs in its place for a
        backward that is differentiated itself; the first time warn."""
        self.planned -= 1
        self.original += 1
        if not self._differentiated:
            self._differentiated = True
            warnings.warn(
                "a planned call's backward is differentiated itself (create_graph=True: a gradient "
                "penalty, a product with a Hessian), which a plan cannot do: the original model "
                "runs for it, outside of the budget. The planned module's .calls counts such "
                "calls; this is said once",
                stacklevel=2,
            )

"""How the calls of a planned module ran: under the plan, or how else."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import nn


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

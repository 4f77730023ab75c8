"""Computes the gradient that a whole step's backward begins with: the loss is divided by the number
of micro-batches, and scaled by a `torch.amp.GradScaler`, whose scale is updated after the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt.torch_private.modules import forget_step


class LossScaling:
    """The loss's gradient in a step, and a GradScaler's part in it."""

    def __init__(self, micro_batches: int, scaler: Any, device: torch.device) -> None:
        self._micro_batches = micro_batches
        self._scaler = scaler
        self._device = device

    @property
    def scaler(self) -> Any:
        """The GradScaler; None: there is none."""
        return self._scaler

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient that autograd would begin one micro-batch's backward with."""
        if self._micro_batches == 1 and self._scaler is None:
            return torch.ones_like(loss)
        with torch.enable_grad():
            leaf = loss.detach().requires_grad_()
            value = leaf / self._micro_batches if self._micro_batches > 1 else leaf
            if self._scaler is not None:
                value = self._scaler.scale(value)
            (gradient,) = torch.autograd.grad(value, leaf)
        return gradient

    def inverse(self) -> torch.Tensor:
        """Return the factor that unscales gradients: as `GradScaler.unscale_` computes it, in
        double precision and rounded."""
        return self._number(1.0 / self._scaler.get_scale())

    def update(self, finite: bool) -> None:
        """End a step: the scale grows or shrinks, as `GradScaler.update` decides.

        The planned step's own gradients are gone by now, so the scaler steps an optimizer of one
        number, whose gradient is finite or not. If that fails the scaler is as before.
        """
        scaler = self._scaler
        before = scaler.state_dict()
        number = nn.Parameter(self._number(0.0))
        number.grad = self._number(0.0 if finite else torch.inf)
        stands_in = torch.optim.SGD([number], lr=0.0)
        try:
            scaler.unscale_(stands_in)
            scaler.step(stands_in)
            scaler.update()
        except BaseException:
            forget_step(scaler, stands_in)
            scaler.load_state_dict(before)
            raise

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self._device)

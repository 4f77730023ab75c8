"""A model and its loss as one module whose only output is the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WithLoss(nn.Module):
    """`forward(*inputs, **inputs)` of the model, then the loss; returns the scalar only, so that
    the big output (logits) is the plan's to free, as it is eager's."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The scalar loss of the model's output."""
        return self.loss(self.model(*args, **kwargs))

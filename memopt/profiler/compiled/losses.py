"""The backward of the negative log-likelihood without a scattered tensor.

Torch takes it apart into zeros and a scatter, which a region alone keeps whole: for a language
model as much as its logits. (Inductor removes that from whole graphs.) As a comparison of the
classes with the target it is pointwise, and fuses with softmax's backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MEAN = 1
"""ATen's number of the reduction."""


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """`aten.nll_loss_backward`, argument by argument."""
    classes = self.shape[-1]
    grad = grad_output / total_weight if reduction == _MEAN else grad_output
    chosen = torch.where(target != ignore_index, target, -1).to(torch.int32).unsqueeze(-1)
    here = chosen == torch.arange(classes, dtype=torch.int32, device=self.device)
    value = -grad if grad.dim() == 0 else -grad.unsqueeze(-1)
    if weight is not None:
        value = value * weight
    return torch.where(here, value, 0.0).to(self.dtype)

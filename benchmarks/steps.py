"""Training steps to compare: what one leaves is cleared, what it allocates is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from memopt.pricing.memory import metered

Step = Callable[[], object]
CPU = torch.device("cpu")


def clear(model: nn.Module) -> None:
    """Drop gradients, so that every step starts alike."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def peak_of(model: nn.Module, step: Step, device: torch.device) -> int:
    """Measure the peak bytes of a step above what is live before it, after one step to warm up."""
    clear(model)
    step()
    clear(model)
    with metered(device) as use:
        step()
    clear(model)
    return use.peak_bytes

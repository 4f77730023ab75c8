"""Training steps to compare: what one leaves is cleared, what it takes is measured."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from memopt.pricing.memory import metered

Step = Callable[[], object]
FoundT = TypeVar("FoundT")
CPU = torch.device("cpu")


def timed(run: Callable[[], FoundT]) -> tuple[FoundT, float, float]:
    """Give what `run` gives, and what it took: seconds of the clock and of this process's CPU."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = run()
    return found, time.perf_counter() - wall_s, time.process_time() - cpu_s


def clear(model: nn.Module) -> None:
    """Drop gradients, so that every step starts alike."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients that a model has, by its parameters' names."""
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Give the largest difference between tensors of the same names, in units of the expected
    one's largest value; 0: bit for bit, nan: other names, or a value that is no number.

    Gradients that are zero but for rounding (a bias before a batch norm) are measured in units of
    a thousandth of the largest value of all tensors.
    """
    if expected.keys() != found.keys():
        return math.nan
    sizes = {name: float(value.double().abs().max()) for name, value in expected.items()}
    least = max(sizes.values(), default=0.0) / 1000
    worst = [0.0]
    for name, value in expected.items():
        differs = float((value.double() - found[name].double()).abs().max())
        worst.append(differs / (max(sizes[name], least) or 1.0))
    return float(torch.tensor(worst, dtype=torch.float64).max())


def peak_of(model: nn.Module, step: Step, device: torch.device) -> int:
    """Measure the peak bytes of a step above what is live before it, after one step to warm up."""
    clear(model)
    step()
    clear(model)
    with metered(device) as use:
        step()
    clear(model)
    return use.peak_bytes

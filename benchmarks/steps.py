"""Training steps to compare: what one leaves is cleared, what it takes is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

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


def peak_of(model: nn.Module, step: Step, device: torch.device) -> int:
    """Measure the peak bytes of a step above what is live before it, after one step to warm up."""
    clear(model)
    step()
    clear(model)
    with metered(device) as use:
        step()
    clear(model)
    return use.peak_bytes

"""What benchmarks share: training steps side by side, their peaks, their interleaved times."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from memopt.profiler.memory import metered

Step = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """One way to train: peak above the resident bytes, and median seconds of a step."""

    peak_bytes: int
    step_time_s: float


def clear(model: nn.Module) -> None:
    """Drop gradients, so that every step starts alike."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def peak_of(model: nn.Module, step: Step, device: torch.device) -> int:
    """Peak bytes of one step above what is live before it, after one step to warm up."""
    clear(model)
    step()
    clear(model)
    with metered(device) as use:
        step()
    clear(model)
    return use.peak_bytes


def interleaved(
    model: nn.Module, steps: Mapping[str, Step], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every step, one of each in turn, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            clear(model)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:
                times[name].append(time.perf_counter() - begin)
    return times


def measure_all(
    model: nn.Module, steps: Mapping[str, Step], rounds: int, device: torch.device
) -> dict[str, Measured]:
    """Peaks and interleaved median times of several ways to train one model."""
    peaks = {name: peak_of(model, step, device) for name, step in steps.items()}
    times = interleaved(model, steps, rounds, device)
    return {n: Measured(peaks[n], statistics.median(times[n])) for n in steps}


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of the paired ratio time(name) / time(base)."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

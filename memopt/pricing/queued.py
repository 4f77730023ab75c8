"""Times calls as a step on a device runs them: in a queue that is never empty, from cold caches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memopt.step.backend import backend_of

_KERNELS_PER_WRITE = 4
"""Kernels that the host enqueues, at 20 us each, while a GPU writes 256 MiB."""


def seconds_of(
    run: Callable[[int], object], device: torch.device, repeats: int, kernels: int = 1
) -> float:
    """Return the seconds that `repeats` calls in a row take, of which each is given its number.

    On a device they wait in its queue behind writes that empty its caches, so that it never waits
    for the host. On the host they are timed as they are.

    Args:
        run: launches kernels on the device's current stream.
        device: where.
        repeats: at least 1.
        kernels: how many `run` launches.
    """
    backend = backend_of(device)
    runtime = backend.runtime
    if runtime is None:
        begin = time.perf_counter()
        for number in range(repeats):
            run(number)
        return time.perf_counter() - begin
    start, end = runtime.Event(enable_timing=True), runtime.Event(enable_timing=True)
    if backend.cache_bytes:
        lines = torch.empty(backend.cache_bytes, dtype=torch.uint8, device=device)
        for _ in range(1 + repeats * kernels // _KERNELS_PER_WRITE):
            lines.zero_()
    stream = runtime.current_stream(device)  # of the model's device, whichever is current
    start.record(stream)
    for number in range(repeats):
        run(number)
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3

"""Measured memory: what torch's own allocators say, byte by byte.

On CPU the allocation events of torch's profiler are summed; scratch that bypasses torch's
allocator (oneDNN's own) is invisible. On CUDA the caching allocator's statistics are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_MEMORY_EVENT = "[memory]"


@dataclass
class MemoryUse:
    """Filled when the metered block ends. Bytes are relative to the block's start.

    Attributes:
        peak_bytes: the highest level above the start.
        end_bytes: the level at the end above the start.
    """

    peak_bytes: int = 0
    end_bytes: int = 0


@contextmanager
def metered(device: torch.device) -> Iterator[MemoryUse]:
    """Measure the device memory of a block.

    Everything the process allocates on the device counts, from any thread.
    """
    use = MemoryUse()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield use
        torch.cuda.synchronize(device)
        use.peak_bytes = torch.cuda.max_memory_allocated(device) - start
        use.end_bytes = torch.cuda.memory_allocated(device) - start
        return
    with _cpu_profile() as profiler:
        yield use
    level = 0
    for _, size in memory_events(profiler):
        level += size
        use.peak_bytes = max(use.peak_bytes, level)
    use.end_bytes = level


@contextmanager
def _cpu_profile() -> Iterator[Any]:
    # Kineto prints two lines per session on stderr unless told otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        yield profiler


def memory_events(profiler: Any) -> list[tuple[int, int]]:
    """(time in ns, bytes: positive allocated, negative freed) of a finished CPU profile."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == _MEMORY_EVENT
    ]
    events.sort(key=lambda event: event[0])
    return events


def metered_sections(device: torch.device, sections: list[Callable[[], object]]) -> list[MemoryUse]:
    """Meter several blocks in one profiling session; each block's results are kept alive until
    its end is read, then dropped. Bytes are relative to each block's own start."""
    if device.type == "cuda":
        uses = []
        for section in sections:
            with metered(device) as use:
                kept = section()
            del kept
            uses.append(use)
        return uses
    with _cpu_profile() as profiler:
        for section in sections:
            with torch.profiler.record_function("memopt::section"):
                kept = section()
            del kept
    results = profiler.profiler.kineto_results.events()
    spans = sorted(
        (event.start_ns(), event.end_ns()) for event in results if event.name() == "memopt::section"
    )
    events = memory_events(profiler)
    uses, position = [], 0
    for start, end in spans:
        use, level = MemoryUse(), 0
        while position < len(events) and events[position][0] < start:
            position += 1
        while position < len(events) and events[position][0] <= end:
            level += events[position][1]
            use.peak_bytes = max(use.peak_bytes, level)
            position += 1
        use.end_bytes = level
        uses.append(use)
    return uses

"""The memory meter: what it counts, and what a kernel's workspace is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memopt.profiler.memory import metered, metered_sections

CPU = torch.device("cpu")


def test_peak_and_end() -> None:
    with metered(CPU) as use:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(200, dtype=torch.uint8)
    assert (use.peak_bytes, use.end_bytes) == (1500, 700)
    del b, c


def test_what_was_there_before_does_not_count() -> None:
    before = torch.empty(400, dtype=torch.uint8)
    with metered(CPU) as use:
        del before
        after = torch.empty(100, dtype=torch.uint8)
    assert (use.peak_bytes, use.end_bytes) == (100, 100)
    del after


def test_failing_block() -> None:
    with pytest.raises(ZeroDivisionError), metered(CPU):
        _ = 1 / 0
    with metered(CPU) as use:
        kept = torch.empty(64, dtype=torch.uint8)
    assert use.end_bytes == 64
    del kept


def test_sections_are_apart() -> None:
    def temporary() -> torch.Tensor:
        scratch = torch.empty(1000, dtype=torch.uint8)
        result = torch.empty(10, dtype=torch.uint8)
        del scratch
        return result

    def prepare() -> Callable[[], torch.Tensor]:
        prepared = torch.empty(5000, dtype=torch.uint8)
        return lambda: prepared[:77].clone()

    uses = metered_sections(CPU, [lambda: temporary, prepare, lambda: temporary])
    assert [(u.peak_bytes, u.end_bytes) for u in uses] == [(1010, 10), (77, 77), (1010, 10)]

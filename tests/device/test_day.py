"""The cells of the day when a GPU is there (`make bench-gpu`), each at tiny size on the device."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.subject import Machine


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_the_day(name: str, device: torch.device) -> None:
    rows = list(CELLS[name](Machine(device, "tiny", 1)))
    assert rows
    assert [row for row in rows if row.verdict in ("no", "failed")] == []

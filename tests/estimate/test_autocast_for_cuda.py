"""autocast("cuda") in estimates: no machine without CUDA and no fake tensor stops it silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt

CASTS = "aten._to_copy.default"


class _Inside(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(16, 16), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=self.dtype):
            return self.linear(x)


def _plan(model: nn.Module, device: str = "H100") -> memopt.Plan:
    inputs = torch.ones(8, 16)
    return memopt.plan(
        model, inputs, strategy="store-all", mode="estimate", device=device, progress=False
    )


def _casts(plan: memopt.Plan) -> int:
    return sum(one.target == CASTS for one in plan.graph.operators)


@pytest.mark.parametrize(("dtype", "named"), [(torch.bfloat16, "bfloat16"), (None, "float16")])
def test_inside_the_model(dtype: torch.dtype | None, named: str) -> None:
    before = torch.autocast.__init__
    plan = _plan(_Inside(dtype))
    assert _casts(plan) >= 3
    assert any('autocast("cuda") is estimated' in n and f" {named}." in n for n in plan.notes)
    assert torch.autocast.__init__ is before


def test_as_on_the_cpu() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = _plan(nn.Linear(16, 16))
    assert _casts(around) == _casts(_plan(_Inside(torch.bfloat16)))
    assert not any("autocast" in note for note in around.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch leaves autocast on beside CUDA")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_switched_off_by_torch() -> None:
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r'autocast\("cpu", dtype=torch.bfloat16, enabled=...\)'),
    ):
        _plan(nn.Linear(16, 16))
    # As the message says to write it.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        plan = _plan(nn.Linear(16, 16))
    assert not any("autocast" in note for note in plan.notes)


def test_activations_in_the_lower_precision_take_half() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

    def saved_bytes() -> int:
        inputs = torch.ones(4096, 256)
        how = {"strategy": "store-all", "mode": "estimate", "device": "H100", "progress": False}
        plan = memopt.plan(model, inputs, **how)
        return plan.peak_bytes - plan.resident_bytes

    whole = saved_bytes()
    with torch.autocast("cpu", torch.bfloat16):
        half = saved_bytes()
    assert 0.45 * whole < half < 0.65 * whole

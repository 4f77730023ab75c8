"""What einops finds at its first call is no change to what a plan depends on."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt

FOUND: dict[type, str] = {}


def rearrange(x: Tensor, _: str) -> Tensor:
    """As einops': remember what was found for a class of tensors."""
    if type(x) not in FOUND:
        FOUND[type(x)] = "torch"
    return x


class Rearranging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.linear(x), "a b -> a b").relu()


def test_a_plan_is_applied_as_it_was_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning emptied the table again, and the first call captured the model anew."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    library = types.ModuleType("einops")
    monkeypatch.setattr(library, "rearrange", rearrange, raising=False)
    monkeypatch.setitem(sys.modules, "einops", library)
    FOUND.clear()
    model, x = Rearranging(), torch.randn(4, 8)
    made = memopt.plan(model, x, strategy="store-all", progress=False)
    assert made.profiled is not None
    assert made.profiled.captured.dependencies.unchanged(model)
    assert set(FOUND) == {Tensor, nn.Parameter}

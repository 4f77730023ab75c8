"""A part whose loss uses some of its outputs is planned anew for these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import memopt


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return h, self.second(h).sigmoid()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Two(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.part(x)[0])


def test_a_part_of_which_one_output_is_used_is_planned_anew() -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Model()
        if wrapped:
            memopt.wrap(model, "min", parts=["part"], strategy="rotor", progress=False)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(64, 32)).square().mean().backward()
        found.append([one.grad for one in model.parameters() if one.grad is not None])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

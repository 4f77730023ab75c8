"""Convolutions that write over what they read, and weight gradients from what made their input:
against float64, and within whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.kernels import with_implementations
from memopt.models.graph import Graph, Operator
from memopt.profiler.session import profile_model
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Instruction, Program
from memopt.programs.liveness import computes, with_frees
from tests.kernels.test_in_plans import QUICK, _gradients, planned
from tests.kernels.test_kernels import F64, Scaled, _check

NAMES = (
    "split 8",
    "weight gradient again",
    "input gradient split",
    "bitmask",
)


def choosing(graph: Graph) -> tuple[Program, set[str]]:
    """Every operator once by the first of NAMES, or twice: a run for each gradient."""
    steps: list[Instruction] = []
    used: set[str] = set()
    for step in computes(graph, range(len(graph.operators))):
        if not isinstance(step, Compute):
            steps.append(step)
            continue
        names = _names(graph.operators[step.op])
        used.update(names)
        steps += [Compute(step.op, (), name) for name in names or [None]]
    return Program(with_frees(graph, steps)), used


def _names(operator: Operator) -> list[str]:
    found = [choice.name for choice in operator.implementations]
    wanted = [name for name in (*NAMES, "weight gradient", "input gradient") if name in found]
    if "weight gradient" not in found:
        return [name for name in wanted[:1] if name in NAMES]
    sides = ([n for n in wanted if n.startswith(side)] for side in ("weight", "input"))
    return [names[0] for names in sides]


class Branches(nn.Module):
    """A skip around two convolutions and its concatenation, as in a U-Net."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.down = nn.Conv2d(4, 6, 3, padding=1)
        self.up = nn.Conv2d(10, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5) if norm else nn.Identity()
        self.last = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x)
        y = self.up(torch.cat([skip, self.down(skip)], 1))
        result: torch.Tensor = self.last(self.norm(y).relu()).tanh()
        return result


@pytest.mark.parametrize("norm", [False, True])
def test_kernels_against_float64(norm: bool) -> None:
    torch.manual_seed(0)
    names = _check(Scaled(Branches(norm), torch.float32), torch.randn(9, 3, 6, 5), 0)
    found = {name.split(" ", 1)[1] for name in names}
    assert found >= set(NAMES)


@pytest.mark.parametrize("norm", [False, True])
def test_steps_that_use_them(norm: bool) -> None:
    torch.manual_seed(0)
    model, x = Branches(norm).double(), torch.randn(9, 3, 6, 5, dtype=F64)
    loss = nn.Sequential(model, _Mean())
    expected = _gradients(loss, model, (x,))
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    program, used = choosing(profiled.graph)
    assert used >= set(NAMES)
    program = with_in_place(profiled.graph, program)
    over = {s.implementation for s in program if isinstance(s, Compute) and s.in_place is not None}
    assert over >= {"input gradient split", "bitmask"}
    module = nn.Sequential(planned(profiled, model, program, False), _Mean())
    for a, b in zip(_gradients(module, model, (x,)), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)


class _Mean(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

"""Missing synchronization is caught, by seeded mutants of the executor; without one, nothing is."""

from __future__ import annotations

import functools
from random import Random

import pytest
import torch
from torch import Tensor, nn

from memopt.executor.module import PlannedModule
from memopt.programs.instructions import Program
from tests.executor.harness import Prepared, prepare, swap_all
from tests.races.judge import COMPUTE, OTHER, Judge
from tests.races.judged import complaints, judged
from tests.races.mutants import MUTANTS, Mutant
from tests.random_programs import random_program


class Layers(nn.Module):
    """Without buffers: steps on two streams share nothing that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.nn.functional.gelu(self.first(x)).tanh()) + x).sigmoid()


@functools.cache
def prepared() -> Prepared:
    torch.manual_seed(0)
    return prepare(Layers(), torch.randn(4, 6))


@functools.cache
def programs() -> tuple[Program, ...]:
    """Everything moved, and some at random."""
    graph = prepared().graph
    return (
        swap_all(graph),
        *(random_program(Random(seed), graph, recomputations=4, swaps=8) for seed in range(3)),
    )


def two_streams(judge: Judge, planned: PlannedModule) -> None:
    """Steps and steps without a backward, on two streams that never wait for each other."""

    def forward(stream: str) -> Tensor:
        judge.current = stream
        planned.original.zero_grad(set_to_none=True)
        loss: Tensor = planned(torch.ones(4, 6)).sum()
        return loss

    forward(COMPUTE).backward()
    forward(COMPUTE)
    forward(OTHER).backward()
    left = forward(OTHER)
    judge.current = COMPUTE
    del left
    forward(COMPUTE).backward()
    planned.original.zero_grad(set_to_none=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    ways = {"streams": mutant.streams, "swap": mutant.swap}
    with mutant.patched():
        changed = (mutant.program(prepared().graph, one) for one in programs())
        assert any(complaints(judged(prepared(), one, two_streams, **ways)) for one in changed)


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
def test_as_it_is_nothing_is_found(interpreted: bool) -> None:
    for program in programs():
        judge = judged(prepared(), program, two_streams, interpreted=interpreted)
        assert complaints(judge) == []
        assert judge.launches["out"] > 0
        assert judge.launches["in"] > 0

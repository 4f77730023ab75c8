"""Runs by implementations that need less memory, where a program needs too much."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.shared.kernel_choice import smaller_implementations
from tests.models.training_graphs import overwriting
from tests.random_programs import random_program


def gradients() -> Graph:
    """x and g to gx and gw, of 10 bytes each but x and gw of 1; apart, and gx over g."""
    x, g, gx, gw = (
        Tensor("x", 1),
        Tensor("g", 10),
        Tensor("gx", 10),
        Tensor("gw", 1),
    )
    source = Tensor("source", 0, TensorKind.INPUT)
    apart = (
        Implementation("weight", 0.5, 0, (1, 2), (4,)),
        Implementation("input", 0.5, 0, (2,), (3,)),
        Implementation("over", 0.75, 2, (2,), (3,), in_place=(2,)),
    )
    operators = (
        Operator("both", (0,), (1, 2), 1.0),
        Operator("backward", (1, 2), (3, 4), 1.0, 0, implementations=apart),
    )
    return Graph((source, x, g, gx, gw), operators, outputs=(3, 4))


@pytest.mark.parametrize(
    ("budget", "names", "peak"),
    [(22, [None], 22), (21, ["weight", "input"], 21), (15, ["weight", "over"], 13), (12, None, 13)],
)
def test_the_fastest_that_fits_or_what_needs_least(budget, names, peak):
    graph = gradients()
    program = store_all(graph)
    made = smaller_implementations(graph, program, budget, None)
    assert validate(graph, made) is None
    assert replay(graph, made).peak_bytes == peak
    if names is not None:
        assert [s.implementation for s in made if isinstance(s, Compute)][1:] == names
    assert smaller_implementations(graph, program, budget, lambda *_: False) == program


def test_in_two_runs_the_first_operand_goes_between():
    made = smaller_implementations(gradients(), store_all(gradients()), 21, None)
    kinds = [type(step) for step in made]
    assert kinds == [Compute, Compute, Free, Compute, Free]


@pytest.mark.parametrize("seeds", [range(k, k + 100) for k in range(0, 300, 100)])
def test_laws_on_random_programs(seeds):
    changed = 0
    for seed in seeds:
        rng = Random(seed)
        graph = overwriting(rng, random_graph(rng, rng.randint(2, 9), implementations=True))
        program = random_program(rng, graph, recomputations=rng.randint(0, 4), swaps=0)
        program = with_in_place(graph, program)
        before = replay(graph, program)
        budget = rng.randint(before.peak_bytes // 2, before.peak_bytes)
        made = smaller_implementations(graph, program, budget, None)
        assert validate(graph, made) is None
        assert replay(graph, made).peak_bytes <= before.peak_bytes
        changed += made != program
    assert changed > 5

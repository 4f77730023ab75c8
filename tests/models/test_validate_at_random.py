"""The replay and the validator agree on random programs and placements, and mutations are named."""

from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.programs.instructions import (
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.replay import replay
from memopt.programs.validate import ViolationCode, memory_use, validate
from tests.random_programs import random_placement, random_program

Code = ViolationCode


def drawn(seed: int) -> tuple[Random, Graph, Program]:
    """A random training step and a random valid program for it."""
    rng = Random(seed)
    graph = random_graph(
        rng,
        rng.randint(1, 9),
        implementations=rng.random() < 0.5,
        updates=rng.random() < 0.3,
        inference=rng.random() < 0.1,
    )
    program = random_program(
        rng,
        graph,
        recomputations=rng.randint(0, 6),
        swaps=rng.randint(0, 3),
        reorder=rng.random() < 0.5,
    )
    return rng, graph, program


@pytest.mark.parametrize("block", range(20))
def test_replay_and_validator_agree_on_random_programs(block):
    for seed in range(block * 150, block * 150 + 150):
        _, graph, program = drawn(seed)
        timeline = replay(graph, program)
        use = memory_use(graph, program)
        assert timeline.step_bytes == tuple(use.during), seed
        assert timeline.host_bytes == tuple(use.host), seed
        assert (timeline.peak_bytes, timeline.host_peak_bytes) == (use.peak, use.host_peak), seed
        assert validate(graph, program, Budget(use.peak, use.host_peak)) is None, seed
        over = validate(graph, program, Budget(timeline.peak_bytes - 1))
        assert (over.code, over.instruction) == (Code.OVER_BUDGET, timeline.peak_instruction), seed
        if use.host_peak:
            over = validate(graph, program, Budget(None, use.host_peak - 1))
            assert over.code is Code.OVER_HOST_BUDGET, seed


@pytest.mark.parametrize("block", range(10))
def test_replay_and_validator_agree_on_random_placements(block):
    for seed in range(block * 30, block * 30 + 30):
        rng, graph, program = drawn(seed)
        program = random_placement(rng, graph, program)
        timeline = replay(graph, program)
        assert timeline.placed_peak_bytes >= timeline.peak_bytes, seed
        assert validate(graph, program, Budget(timeline.placed_peak_bytes)) is None, seed
        if timeline.placed_peak_bytes > timeline.peak_bytes:
            over = validate(graph, program, Budget(timeline.placed_peak_bytes - 1))
            assert over.code is Code.ARENA_OVER_BUDGET, seed


def mutations_of(graph: Graph, program: Program):
    """(codes one of which must be named, mutated program) for a random good program."""
    good = program.instructions
    for i, instruction in enumerate(good):
        without = Program([*good[:i], *good[i + 1 :]])
        twice = Program([*good[: i + 1], *good[i:]])
        if isinstance(instruction, Free):
            again = {Code.LEFT_ON_DEVICE, Code.COMPUTED_WHILE_LIVE, Code.SWAP_IN_WHILE_LIVE}
            yield again, without
            yield {Code.FREED_ABSENT}, twice
        elif isinstance(instruction, SwapOut):
            yield {Code.SWAP_IN_ABSENT}, without
            yield {Code.SWAP_OUT_TWICE}, twice
        elif isinstance(instruction, SwapIn):
            yield {Code.READ_ON_HOST, Code.READ_ABSENT, Code.FREED_ABSENT}, without
            yield {Code.SWAP_IN_WHILE_LIVE}, twice
        elif isinstance(instruction, DropHost):
            yield {Code.LEFT_ON_HOST}, without
            yield {Code.DROP_HOST_ABSENT}, twice
        elif isinstance(instruction, LossBoundary):
            yield {Code.NO_LOSS_BOUNDARY}, without
            yield {Code.SECOND_LOSS_BOUNDARY}, twice
        elif instruction.outputs:
            missing = {Code.READ_ABSENT, Code.READ_ON_HOST, Code.RESULT_MISSING}
            missing.add(Code.SWAP_OUT_ABSENT)
            if graph.operators[instruction.op].random:
                # Where it runs again, that is its first run now.
                missing |= {Code.OPERATOR_MISSING, Code.RANDOM_ORDER, Code.RANDOM_AFTER_LOSS}
            yield missing, without
            yield {Code.COMPUTED_WHILE_LIVE, Code.NOT_RECOMPUTABLE}, twice


@pytest.mark.parametrize("block", range(4))
def test_mutations_of_random_programs_are_named(block):
    for seed in range(block * 40, block * 40 + 40):
        _, graph, program = drawn(seed)
        for codes, mutated in mutations_of(graph, program):
            violation = validate(graph, mutated)
            assert violation is not None, seed
            assert violation.code in codes, (seed, violation)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(40))
def test_replay_and_validator_agree_on_many_more(block):
    for seed in range(10_000 + block * 500, 10_000 + block * 500 + 500):
        _, graph, program = drawn(seed)
        use = memory_use(graph, program)
        assert replay(graph, program).step_bytes == tuple(use.during), seed
        assert validate(graph, program, Budget(use.peak, use.host_peak)) is None, seed

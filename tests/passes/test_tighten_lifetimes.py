"""Shorter lifetimes of moved tensors: valid, in the same time, inside the lifetimes they had."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.passes.tighten_lifetimes import tighten_lifetimes
from memopt.programs.instructions import Compute, Free, Instruction, Program, SwapIn, SwapOut
from memopt.programs.replay import Direction, replay
from memopt.programs.validate import validate
from tests.random_programs import random_program


def cases(count: int, seed: int) -> list[tuple[Graph, Program, Device]]:
    """Random programs that recompute and swap, with slow and fast links."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        graph = random_graph(rng, rng.randint(2, 9), implementations=True)
        program = random_program(
            rng, graph, recomputations=rng.randint(0, 3), swaps=rng.randint(1, 6)
        )
        found.append((graph, program, link(rng, graph)))
    return found


def link(rng: Random, graph: Graph) -> Device:
    """One over which all tensors take between a tenth of the step's time and ten times that."""
    step_s = sum(operator.time_s for operator in graph.operators)
    total_bytes = sum(tensor.size_bytes for tensor in graph.tensors)
    rate = total_bytes / (step_s * 10 ** rng.uniform(-1, 1)) if step_s else 1e9
    return replace(
        Device(),
        to_host_bytes_per_s=rate,
        from_host_bytes_per_s=rate * rng.choice([1, 0.5, 2]),
        duplex=rng.random() < 0.5,
    )


def held(graph: Graph, program: Program) -> list[int]:
    """Device memory while each Compute runs, in their order."""
    rows = replay(graph, program).step_bytes
    return [size for x, size in zip(program, rows, strict=True) if isinstance(x, Compute)]


def starts_s(graph: Graph, program: Program, device: Device) -> list[float]:
    """When each computation and each copy to the host starts, and the end of the step."""
    timeline = replay(graph, program, device)
    rows = zip(program, timeline.start_s, strict=True)
    computed = [start_s for x, start_s in rows if isinstance(x, Compute)]
    copied = [x.start_s for x in timeline.transfers if x.direction is Direction.TO_HOST]
    return [*computed, *copied, timeline.time_s]


def kinds(program: Program, *kind: type[Instruction]) -> list[Instruction]:
    return [x for x in program if isinstance(x, kind)]


def test_shortened_programs_are_valid_no_slower_and_hold_no_more() -> None:
    less = 0
    for graph, program, device in cases(400, 5):
        short = tighten_lifetimes(graph, program, device)
        assert validate(graph, short) is None
        before, after = replay(graph, program, device), replay(graph, short, device)
        assert after.time_s <= before.time_s * (1 + 1e-9)
        assert after.peak_bytes <= before.peak_bytes
        assert after.host_peak_bytes == before.host_peak_bytes
        pairs = list(zip(held(graph, short), held(graph, program), strict=True))
        assert all(now <= then for now, then in pairs)
        less += any(now < then for now, then in pairs)
        for kind in (Compute, SwapOut, SwapIn):
            assert kinds(short, kind) == kinds(program, kind)
        assert sorted(map(repr, kinds(short, Free))) == sorted(map(repr, kinds(program, Free)))
    assert less > 50


def test_nothing_is_left_to_shorten() -> None:
    for graph, program, device in cases(150, 6):
        short = tighten_lifetimes(graph, program, device)
        again = tighten_lifetimes(graph, short, device)
        assert held(graph, again) == held(graph, short)


@pytest.mark.parametrize("duplex", [True, False])
def test_no_fetch_and_no_free_could_move_one_computation_further(duplex: bool) -> None:
    """Every move of a fetch behind the next computation, or of a free before the one before,
    breaks the program or makes a computation or a copy to the host wait."""
    tried = 0
    for graph, program, link_ in cases(120, 7):
        device = replace(link_, duplex=duplex)
        short = tighten_lifetimes(graph, program, device)
        own_s = starts_s(graph, short, device)
        for position, instruction in enumerate(short):
            if isinstance(instruction, Free):
                other = position - 1
            elif isinstance(instruction, SwapIn):
                other = position + 1
            else:
                continue
            if not 0 <= other < len(short) or not isinstance(short.instructions[other], Compute):
                continue
            swapped = list(short.instructions)
            swapped[position], swapped[other] = swapped[other], swapped[position]
            moved = Program(swapped)
            if validate(graph, moved) is not None:
                continue
            tried += 1
            pairs = zip(starts_s(graph, moved, device), own_s, strict=True)
            assert any(now_s > then_s for now_s, then_s in pairs)
    assert tried > 20


def test_with_room_made_programs_hold_less_and_say_what_it_costs() -> None:
    less = slower = free_of_charge = 0
    for graph, program, device in cases(400, 8):
        short = tighten_lifetimes(graph, program, device)
        peak_bytes = replay(graph, program, device).peak_bytes
        assert tighten_lifetimes(graph, program, device, room_bytes=peak_bytes) == short
        roomy = tighten_lifetimes(graph, program, device, room_bytes=peak_bytes * 3 // 4)
        assert validate(graph, roomy) is None
        before, after = replay(graph, program, device), replay(graph, roomy, device)
        assert after.peak_bytes <= before.peak_bytes
        pairs = list(zip(held(graph, roomy), held(graph, program), strict=True))
        assert all(now <= then for now, then in pairs)
        for kind in (Compute, SwapOut, SwapIn):
            assert kinds(roomy, kind) == kinds(program, kind)
        assert sorted(map(repr, kinds(roomy, Free))) == sorted(map(repr, kinds(program, Free)))
        if sum(held(graph, roomy)) < sum(held(graph, short)):
            less += 1
            slower += after.time_s > before.time_s * (1 + 1e-9)
            free_of_charge += after.time_s <= before.time_s * (1 + 1e-9)
    assert min(less, slower) > 10
    assert free_of_charge


def test_computations_hold_more_than_the_room_only_with_what_is_needed() -> None:
    """Above `room_bytes` no tensor is left that could be freed before the computation."""
    above = 0
    for graph, program, device in cases(200, 9):
        room_bytes = replay(graph, program).peak_bytes // 2
        roomy = tighten_lifetimes(graph, program, device, room_bytes=room_bytes)
        rows = replay(graph, roomy).step_bytes
        for position, instruction in enumerate(roomy):
            if not isinstance(instruction, Free) or position == 0:
                continue
            other = roomy.instructions[position - 1]
            if not isinstance(other, Compute) or rows[position - 1] <= room_bytes:
                continue
            swapped = list(roomy.instructions)
            swapped[position - 1], swapped[position] = instruction, other
            assert validate(graph, Program(swapped)) is not None
            above += 1
    assert above > 20

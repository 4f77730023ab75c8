"""Programs that move and recompute, on streams that overlap: right whatever is late; and with a
defect in the executor, wrong."""

from __future__ import annotations

import pytest
import torch

from memopt.passes.passes import place_program
from memopt.programs.in_place import with_in_place
from tests.device.mutants import MUTANTS, Mutant
from tests.device.racing import complaints, generated, prepared, programs


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in range(12)]
)
def test_a_random_program(seed: int, interpreted: bool, device: torch.device) -> None:
    assert complaints(generated(seed), interpreted=interpreted) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_random_program_at_addresses(seed: int, device: torch.device) -> None:
    graph = prepared().graph
    program, _ = place_program(graph, with_in_place(graph, generated(seed)))
    assert program.offsets
    assert complaints(program) == []


def test_nothing_is_found_without_a_mutant(device: torch.device) -> None:
    for program in programs():
        assert complaints(program) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant, device: torch.device) -> None:
    ways = {"streams": mutant.streams, "swap": mutant.swap}
    with mutant.patched():
        changed = (mutant.program(prepared().graph, one) for one in programs())
        assert any(complaints(one, **ways) for one in changed)

"""Programs with collectives run as the unplanned model does; waits stand where programs read."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memopt.executor import code_writer
from memopt.models.graph import Graph
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.instructions import Compute, Free, Instruction, Program
from memopt.programs.liveness import store_all
from memopt.step.collectives import WAIT
from tests.executor.harness import Case, assert_same, check, prepare, recompute_late, run_steps
from tests.network.sharded import alone, layers, sharded


def test_planned_steps_are_the_unplanned_ones() -> None:
    with alone():
        check(Case(lambda: sharded(layers(1)), lambda: (torch.randn(3, 6),)))


@pytest.mark.slow
def test_gathered_in_another_dtype() -> None:
    with alone():
        half = torch.bfloat16
        check(Case(lambda: sharded(layers(1), half), lambda: (torch.randn(3, 6).to(half),)))


def test_started_early_and_given_back_late_it_is_the_same_step() -> None:
    def early(graph: Graph) -> Program:
        slow = [replace(x, time_s=1.0 + 2 * (x.collective is not None)) for x in graph.operators]
        priced = replace(graph, operators=tuple(slow))
        return with_early_collectives(priced, recompute_late(priced), None)

    with alone():
        torch.manual_seed(0)
        model = sharded(layers(2))
        case = Case(lambda: model, lambda: (torch.randn(3, 6),))
        start, reference = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
        torch.manual_seed(1)
        expected = run_steps(case, reference, reference)
        prepared = prepare(model, case.inputs())
        program = early(prepared.graph)
        assert program != recompute_late(prepared.graph)
        for interpreted in (False, True):
            model.load_state_dict(start)
            torch.manual_seed(1)
            planned = prepared.planned(program, interpreted)
            assert_same(run_steps(case, planned, model), expected, f"interpreted {interpreted}")


def moved(program: Program, wanted: Instruction, places: int) -> Program:
    """The program with one instruction moved."""
    instructions = list(program)
    position = instructions.index(wanted)
    instructions.insert(position + places, instructions.pop(position))
    return Program(instructions)


def test_the_code_starts_where_the_program_does_and_waits_before_the_first_reader() -> None:
    with alone():
        prepared = prepare(sharded(layers(1)), (torch.randn(3, 6),))
        lines = prepared.planned().code.splitlines()
    text = [line.strip().partition(" = ")[0] for line in lines]
    started, waited = text.index("all_gather_into_tensor"), text.index("wait_tensor")
    assert started < text.index("all_gather_into_tensor_1") < waited < text.index("addmm")


def _flat(code: str) -> str:
    """The code's statements, in any context, and operators by one name each."""
    lines = (re.sub(r"_default_\d+\(", "_default(", x.strip()) for x in code.splitlines())
    return "\n".join(line for line in lines if line != "with below_autograd():")


def test_memory_is_given_back_when_the_collective_is_over() -> None:
    with alone():
        prepared = prepare(sharded(layers(1)), (torch.randn(3, 6),))
        graph, program = prepared.graph, store_all(prepared.graph)
        scatters = (i for i, x in enumerate(graph.operators) if "reduce_scatter" in x.target)
        index = next(scatters)
        operator = graph.operators[index]
        (full,), (shard,) = operator.reads, operator.writes
        at = list(program).index(Compute(index, (shard,)))
        assert list(program)[at + 1] == Free(full)
        name, given = prepared.lowering.bases[shard].name, prepared.lowering.bases[full].name
        frees_later = moved(program, Free(full), 2)
        own = _flat(prepared.planned(frees_later).code)
        # As where no collective takes memory of its own.
        with mock.patch.object(code_writer, "has_scratch", return_value=False):
            blocking = prepared.planned(program).code
            later = prepared.planned(frees_later).code
    blocking, later = map(_flat, (blocking, later))
    # gloo's copy of what it sums up goes with the wait, for which no operator may come before.
    assert f"\n{name} = waited(" in own
    assert "let_go" not in own[own.index(f"{name} = ") : own.index(f"del {given}")]
    wait = f"_c10d_functional_wait_tensor_default({name})"
    # A thread of a group on CPU may hold it a moment longer.
    assert f"let_go({wait})\nreleased({given})\ndel {given}" in blocking
    start = later.index(f"{name} = ")
    assert "slice_backward_1 = " in later[start : later.index(wait)]
    assert (
        "slice_backward_1 = " not in blocking[blocking.index(f"{name} = ") : blocking.index(wait)]
    )


class Pair(nn.Module):
    """Two tensors gathered by one collective, read far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.group = dist.distributed_c10d._get_default_group().group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, both = x * self.weight, [x, self.weight.detach()]
        gathers = torch.ops._c10d_functional.all_gather_into_tensor_coalesced
        first, second = map(WAIT, gathers(both, 1, self.group))
        found: torch.Tensor = (y * first).sin() * second
        return found


def test_several_results_are_waited_for_together() -> None:
    """As long as one is not, what the collective read and wrote is held."""
    with alone():
        check(Case(Pair, lambda: (torch.randn(3, 6),)))
        prepared = prepare(Pair(), (torch.randn(3, 6),))
        lines = prepared.planned().code.splitlines()
        late = prepared.planned(recompute_late(prepared.graph)).code
    wait = re.compile(r"_c10d_functional_wait_tensor_default\w*\(")
    waits = [i for i, line in enumerate(lines) if wait.search(line)]
    assert waits[:2] == [waits[0], waits[0] + 1]
    # Of a run of which the program keeps one result, both are waited for where it starts.
    assert "= waited(_c10d_functional_all_gather_into_tensor_coalesced_default(" in late

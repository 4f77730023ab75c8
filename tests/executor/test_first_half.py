"""Backwards in two halves, as the zero-bubble schedules of pipelines run them."""

from __future__ import annotations

import copy
import operator
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt.api import second_half
from memopt.models.budget import Budget
from memopt.models.charges import Charges
from memopt.pricing.memory import metered
from memopt.programs.charged import waiting_bytes
from memopt.programs.first_half import can_wait, first_half_end, halved_bytes, with_waiting
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from tests.distributed.cases import mlp


def stage() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model and the same, planned, with an input."""
    example = torch.randn(64, 16, requires_grad=True)
    planned = memopt.plan(mlp(), example, budget="min", progress=False)
    torch.manual_seed(1)
    return mlp(), planned.apply(mlp()), torch.randn(64, 16, requires_grad=True)


class TwoOutputs(nn.Module):
    """A stage whose second output no parameter reaches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = mlp(), nn.Linear(4, 4)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(input)
        return self.last(hidden), hidden.sin()


def halves(model: Any, input: Tensor, calls: int = 1) -> tuple[list[Any], list[int]]:
    """Run so many calls' first halves, then the second ones, with a mode around that counts: all
    gradients of the first output, and the work of each half."""
    found: list[Any] = []
    work, waiting = [], []
    inputs = [(input.detach() * number).requires_grad_() for number in range(1, 1 + calls)]
    for one, made in [(one, model(one)) for one in inputs]:
        output = made[0] if isinstance(made, tuple) else made
        with FlopCounterMode(display=False) as counted:
            given, groups = stage_backward_input(
                [output], [output.detach().clone()], [one], model.parameters()
            )
        found += given
        waiting.append(groups)
        work.append(counted.get_total_flops())
    for groups in waiting:
        with FlopCounterMode(display=False) as counted:
            stage_backward_weight(model.parameters(), groups)
        work.append(counted.get_total_flops())
    return [*found, *(one.grad for one in model.parameters())], work


def test_a_planned_backward_runs_once_for_both_halves() -> None:
    model, planned, input = stage()
    expected, _ = halves(model, input, calls=3)
    found, work = halves(planned, input, calls=3)
    assert all(map(torch.equal, found, expected))
    output = planned(input)
    with FlopCounterMode(display=False) as whole:
        output.backward(output.detach().clone())
    assert sum(work) == 3 * whole.get_total_flops()
    assert all(work)


def test_gradients_of_parameters_wait_where_a_budget_has_room() -> None:
    """What the first half computes is what autograd computes there; within less it is more."""
    model, _, input = stage()
    for _ in range(2):  # the second step knows how many calls were halved
        expected, work = halves(model, input, calls=3)
    known = {}
    for budget in (None, "min"):
        torch.manual_seed(1)
        wrapped: Any = memopt.wrap(mlp(), budget, "rotor", progress=False)
        for _ in range(2):
            found, known[budget] = halves(wrapped, input, calls=3)
        assert all(map(torch.equal, found, expected))
    assert known[None] == work
    assert known["min"][3] < work[3]


def test_every_choice_of_what_waits_is_a_valid_program() -> None:
    example = torch.randn(64, 16, requires_grad=True)
    for budget in (None, "min"):
        plan = memopt.plan(mlp(), example, budget=budget, strategy="rotor", progress=False)
        graph, program, ends = plan.graph, plan.program, []
        assert graph.input_gradients
        groups = can_wait(graph, program)
        assert len(groups) > 3
        for count in range(len(groups) + 1):
            waiting = frozenset[int]().union(*groups[:count])
            made = with_waiting(graph, program, waiting)
            assert validate(graph, made, Budget(None)) is None
            assert len(made.computes) == len(program.computes)
            end = first_half_end(graph, made)
            later = {run.op for at, run in made.computes if at >= end}
            assert waiting <= later
            assert replay(graph, made).live_bytes[end - 1] <= (
                graph.resident_bytes + halved_bytes(graph, made)
            )
            ends.append(end)
        assert ends[-1] < ends[0] <= len(program)


@pytest.mark.parametrize("rows", [2, 64])
def test_the_least_that_waits_is_found_without_a_plan_for_each_choice(rows: int) -> None:
    example = torch.randn(rows, 16, requires_grad=True)
    plan = memopt.plan(mlp(), example, strategy="rotor", progress=False)
    groups = list(accumulate(can_wait(plan.graph, plan.program), operator.or_))
    every = [with_waiting(plan.graph, plan.program, one) for one in groups]
    least = min(halved_bytes(plan.graph, one) for one in (plan.program, *every))
    checked = mock.patch.object(second_half, "with_program", wraps=second_half.with_program)
    with checked as made:
        found = second_half.waiting_least(plan)
    assert halved_bytes(found.graph, found.program) == least
    assert made.call_count == 1 < len(groups)


def test_a_second_backward_with_other_gradients_is_the_unplanned_one() -> None:
    found = []
    model, planned, input = stage()
    for one in (model, planned):
        loss = one(input).square().mean()
        of_input = torch.autograd.grad(loss, input, retain_graph=True)
        (loss * 2).backward()
        found.append([*of_input, *(p.grad for p in one.parameters()), input.grad])
        input.grad = None
    assert all(map(torch.equal, *found))
    calls = memopt.running(planned).calls
    assert (calls.planned, calls.original) == (0, 1)


def test_a_second_half_that_runs_twice_gives_gradients_of_its_own() -> None:
    """They were the same tensors, which their first receiver may have updated."""
    found = []
    model, planned, input = stage()
    for one in (model, planned):
        output, parameters = one(input), list(one.parameters())
        given = torch.ones_like(output)
        torch.autograd.grad(output, input, given, retain_graph=True)
        first = torch.autograd.grad(output, parameters, given, retain_graph=True)
        first[0].mul_(2)
        found.append([*first, *torch.autograd.grad(output, parameters, given)])
    assert all(map(torch.equal, *found))
    assert memopt.running(planned).calls.planned == 1


def test_the_copies_of_a_second_half_that_runs_again_are_charged() -> None:
    """They were not: 803,848 bytes were used within 542,784."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    model, input = nn.Sequential(*blocks), torch.randn(8, 64, requires_grad=True)
    wrapped: Any = memopt.wrap(copy.deepcopy(model), "min", "rotor", progress=False)

    def gradients(one: nn.Module) -> list[Tensor]:
        output, parameters = one(input), list(one.parameters())
        given = torch.ones_like(output)
        first = torch.autograd.grad(output, input, given, retain_graph=True)
        second = torch.autograd.grad(output, parameters, given, retain_graph=True)
        return [*first, *second, *torch.autograd.grad(output, parameters, given)]

    for _ in range(3):
        assert all(map(torch.equal, gradients(model), gradients(wrapped)))
    there = sum(one.nbytes for one in (input, *wrapped.parameters()))
    with metered(torch.device("cpu")) as used:
        gradients(wrapped)
    assert there + used.peak_bytes <= wrapped.memopt.plans[-1].budget
    assert wrapped.memopt.around.charges(None).halved_calls == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_gradients_that_await_their_half_are_charged() -> None:
    model, _, input = stage()
    wrapped: Any = memopt.wrap(model, "min", progress=False)
    for _ in range(2):
        halves(wrapped, input[:2], calls=3)
    plan = wrapped.memopt.plans[-1]
    charges = Charges(waiting_calls=2, halved_calls=2)
    # Beside the last call's first half, the others keep what waits, which is less than gradients.
    gradients_bytes = sum(one.nbytes for one in model.parameters())
    nothing_waits = store_all(plan.graph)
    assert waiting_bytes(plan.graph, nothing_waits, charges) > gradients_bytes
    assert waiting_bytes(plan.graph, plan.program, charges) < gradients_bytes
    assert wrapped.memopt.around.charges(None).halved_calls == 2


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="without its outputs this torch loses an own function's node",
)
def test_a_first_half_from_some_of_the_outputs_keeps_what_is_charged() -> None:
    """It ran the whole backward, whose gradients wait, and was charged as a cut one."""
    torch.manual_seed(0)
    model, input = TwoOutputs(), torch.randn(16, 16)
    wrapped: Any = memopt.wrap(TwoOutputs(), "min", "rotor", progress=False)
    wrapped.load_state_dict(model.state_dict())
    for _ in range(2):
        for one in (model, wrapped):
            one.zero_grad()
        expected, _ = halves(model, input, calls=3)
        found, own = halves(wrapped, input, calls=3)
        assert all(map(torch.equal, found, expected))
    assert all(own)
    del found
    wrapped.zero_grad()
    there = sum(one.nbytes for one in wrapped.parameters())
    with metered(torch.device("cpu")) as used:
        halves(wrapped, input, calls=3)
    assert there + used.peak_bytes <= wrapped.memopt.plans[-1].budget
    assert wrapped.memopt.calls.planned == 9


def test_a_plan_of_several_lengths_has_halves() -> None:
    model, _, _ = stage()
    wrapped: Any = memopt.wrap(mlp(), None, "rotor", progress=False)
    wrapped.load_state_dict(model.state_dict())
    for rows in (32, 24, 20, 28, 30):
        for one in (model, wrapped):
            one.zero_grad()
        input = torch.randn(rows, 16)
        expected, _ = halves(model, input, calls=2)
        found, own = halves(wrapped, input, calls=2)
        assert all(map(torch.equal, found, expected))
        assert all(own)
    assert len(wrapped.memopt.plans) < 5
    # The calls of all lengths were added up.
    assert wrapped.memopt.around.charges(None).halved_calls == 1

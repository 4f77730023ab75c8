"""Backwards in two halves, as the zero-bubble schedules of pipelines run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt.models.charges import Charges
from memopt.programs.charged import waiting_bytes
from tests.distributed.cases import mlp


def stage() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model and the same, planned, with an input."""
    example = torch.randn(64, 16, requires_grad=True)
    planned = memopt.plan(mlp(), example, budget="min", progress=False)
    torch.manual_seed(1)
    return mlp(), planned.apply(mlp()), torch.randn(64, 16, requires_grad=True)


def halves(model: Any, input: Tensor, calls: int = 1) -> tuple[list[Any], list[int]]:
    """Run so many calls' first halves, then the second ones, with a mode around that counts: all
    gradients, and the work of each half."""
    found: list[Any] = []
    work, waiting = [], []
    inputs = [(input.detach() * number).requires_grad_() for number in range(1, 1 + calls)]
    for one, output in [(one, model(one)) for one in inputs]:
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
    assert work[0] > 0
    assert work[3:] == [0, 0, 0]


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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_gradients_that_await_their_half_are_charged() -> None:
    model, _, input = stage()
    wrapped: Any = memopt.wrap(model, "min", progress=False)
    for _ in range(2):
        halves(wrapped, input[:2], calls=3)
    plan = wrapped.memopt.plans[-1]
    charges = Charges(waiting_calls=2, halved_calls=2)
    more = waiting_bytes(plan.graph, plan.program, charges)
    # Beside the last call's first half, the others keep their gradients.
    assert more >= 2 * sum(one.nbytes for one in model.parameters())
    assert wrapped.memopt.around.charges(None).halved_calls == 2

"""A user's own implementation, as docs/strategies/implementations.md shows it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.kernels import FAMILIES, Kernel, Sites, with_implementations
from memopt.pricing.measure import MeasureOptions
from memopt.profiler.session import profile_model
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import computes, with_frees
from memopt.programs.validate import validate

CALLS: list[str] = []


def log_sigmoid_from_output(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """For y = log σ(x): dy/dx = 1 - σ(x) = 1 - exp(y)."""
    CALLS.append("log-sigmoid")
    return g * -torch.expm1(y)


KERNEL = Kernel("my_log_sigmoid_backward.output", log_sigmoid_from_output)


def attach_log_sigmoid(sites: Sites) -> None:
    for backward in sites.calls("aten.log_sigmoid_backward.default"):
        gradient, _, buffer = backward.args
        forward = sites.producer(buffer)
        y = None if forward is None else sites.result(forward, 0)
        if y is not None:
            sites.add(backward, "output", KERNEL, (gradient, y), exact=False)


def test_a_users_own_family_is_considered_and_executed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LogSigmoid(), nn.Linear(8, 4))
    x = torch.rand(5, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    quick = MeasureOptions(cap_s=0.1, max_rounds=1)
    families = (*FAMILIES, ("log-sigmoid", attach_log_sigmoid))
    profiled = profile_model(model, x, options=quick)
    profiled = with_implementations(profiled, families=families, options=quick)
    graph = profiled.graph
    mine = [i for i, o in enumerate(graph.operators) if "log_sigmoid_backward" in o.target]
    choice = graph.operators[mine[0]].implementations[0]
    assert (choice.name, choice.exact) == ("output", False)
    assert choice.time_s > 0
    steps = computes(graph, range(len(graph.operators)))
    program = Program(
        with_frees(
            graph,
            [
                Compute(s.op, (), "output") if s in [Compute(i, ()) for i in mine] else s
                for s in steps
            ],  # type: ignore[union-attr]  # a Compute
        )
    )
    assert validate(graph, program) is None
    model.zero_grad()
    CALLS.clear()
    installed = install(profiled.captured, profiled.lowering, program)
    runtime = runtime_of(profiled.captured)
    PlannedModule(model, profiled.captured, runtime, installed)(x).sum().backward()
    assert CALLS == ["log-sigmoid"]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5)


def test_a_random_operator_is_replaced_by_what_draws_as_it_does() -> None:
    def attach_noise(sites: Sites) -> None:
        for forward in sites.calls("aten.native_dropout.default"):
            results = (sites.result(forward, 0), sites.result(forward, 1))
            sites.add(forward, "noise", KERNEL, (forward.args[0], forward.args[0]), results)

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    profiled = profile_model(model, torch.rand(5, 8), options=MeasureOptions(max_rounds=1))
    with pytest.raises(ValueError, match="'noise' stands in for 'native_dropout', which"):
        with_implementations(profiled, families=[("noise", attach_noise)])

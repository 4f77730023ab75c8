"""Steps captured as CUDA graphs: captures, copies and replays in order, by a stand-in for the
device whose replay runs the captured function again; what is refused, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ExecutionError, GuardError
from memopt.executor.apply import apply_plan
from memopt.executor.cuda_graph import WARM_UP, CudaGraphs, static_bytes, why_not
from memopt.programs.instructions import SwapOut
from tests.executor.fake_graphs import FakeGraphs


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.norm(torch.tanh(self.first(x)))))


def planned(model: nn.Module, rows: int = 8, **how: Any) -> memopt.Plan:
    how = {"strategy": "rotor", "place": True, **how}
    return memopt.plan(model, torch.randn(rows, 12), progress=False, cache=False, **how)


def graphed(plan: memopt.Plan, model: nn.Module) -> tuple[nn.Module, FakeGraphs]:
    graphs = FakeGraphs()
    return apply_plan(plan, model, cuda_graph=graphs), graphs


def steps(module: nn.Module, model: nn.Module, count: int, rows: int = 8) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of a few accumulating steps on other data each."""
    found = []
    for step in range(count):
        torch.manual_seed(step)
        x = torch.randn(rows, 12)
        output = module(x)
        (output.square().sum() * (step + 1)).backward()
        found += [output.detach(), *(p.grad.clone() for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
        if step % 2:
            model.zero_grad(set_to_none=True)
    return found


def test_replayed_steps_are_eagers() -> None:
    """Bit for bit, gradients that accumulate and batch statistics included."""
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    module, graphs = graphed(planned(model), model)
    found, expected = steps(module, model, 6), steps(twin, twin, 6)
    assert all(map(torch.equal, found, expected))
    assert graphs.captures == 2
    assert graphs.replays == 2 * (6 - WARM_UP)


def test_replays_copy_to_the_host_and_back() -> None:
    """As the worker's thread did in the capture, and values of now."""
    model = nn.Sequential(nn.Linear(12, 4), *[nn.Tanh(), nn.Linear(4, 4)] * 4)
    twin = deepcopy(model)
    plan = planned(model, rows=64, strategy="offload-graph", budget=0.8)
    assert any(isinstance(one, SwapOut) for one in plan.program)
    module, graphs = graphed(replace(plan, budget=None), model)
    assert all(map(torch.equal, steps(module, model, 5, 64), steps(twin, twin, 5, 64)))
    assert graphs.replays


def test_results_are_the_users_own() -> None:
    """The next replay writes to the same addresses: nobody sees it."""
    model = Net()
    module, _ = graphed(planned(model), model)
    steps(module, model, WARM_UP)
    outputs = []
    for _ in range(3):
        outputs.append(module(torch.randn(8, 12)))
        outputs[-1].sum().backward()
    kept = [output.detach().clone() for output in outputs]
    module(torch.randn(8, 12)).sum().backward()
    assert all(map(torch.equal, kept, outputs))


def test_one_step_at_a_time() -> None:
    model = Net()
    module, graphs = graphed(planned(model), model)
    steps(module, model, WARM_UP + 1)
    first = module(torch.randn(8, 12))
    with pytest.raises(ExecutionError, match="still waits for its backward"):
        module(torch.randn(8, 12))
    first.sum().backward()
    dropped = module(torch.randn(8, 12))
    del dropped
    before = graphs.replays
    module(torch.randn(8, 12)).sum().backward()
    assert graphs.replays == before + 2


def test_a_second_backward_is_refused() -> None:
    model = Net()
    module, _ = graphed(planned(model), model)
    steps(module, model, WARM_UP + 1)
    output = module(torch.randn(8, 12))
    with pytest.raises(ExecutionError, match="retain_graph"):
        output.sum().backward(retain_graph=True)


def test_a_parameter_that_moved_is_named() -> None:
    model = Net()
    module, _ = graphed(planned(model), model)
    steps(module, model, WARM_UP + 1)
    model.second.weight.data = model.second.weight.data.clone()
    with pytest.raises(ExecutionError, match=r"second\.weight is elsewhere"):
        module(torch.randn(8, 12))


def test_other_shapes_are_the_guards() -> None:
    model = Net()
    module, graphs = graphed(planned(model), model)
    steps(module, model, WARM_UP + 1)
    before = graphs.replays
    with pytest.raises(GuardError):
        module(torch.randn(9, 12))
    assert graphs.replays == before


def test_what_cannot_be_captured_is_refused() -> None:
    model = Net()

    def refused(reason: str, plan: memopt.Plan, of: nn.Module = model, **how: Any) -> None:
        with pytest.raises(ValueError, match=reason):
            apply_plan(plan, of, **{"cuda_graph": FakeGraphs(), **how})

    plan = planned(model)
    refused("need a CUDA device, and the model is on cpu", plan, cuda_graph=True)
    refused("no fixed addresses: plan with place=True", planned(model, place=False))
    random = Net(dropout=0.5)
    apply_plan(planned(random), random, cuda_graph=FakeGraphs())  # each replay draws anew
    refused("interpreted", plan, interpreted=True)
    refused("checked", plan, checked=True)
    tight = planned(model, budget=plan.peak_bytes)
    needed = static_bytes(plan.profiled.lowering, plan.program)
    refused(f"raise it by {needed - (tight.budget - tight.peak_bytes)} bytes", tight)


def test_a_capture_is_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was on a stream of the device that was current when torch made its own
    (`torch.cuda.graph.default_capture_stream`): on another one it held no kernel, and replays left
    the results of the step that was captured."""
    current, seen = [0], []

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before, current[0] = current[0], torch.device(device).index
        yield
        current[0] = before

    @contextmanager
    def graph(made: Any, pool: Any, stream: Any) -> Iterator[None]:
        seen.append((made, pool, stream, current[0]))
        yield

    for name, value in {
        "device": on,
        "Stream": lambda device: f"stream of {device}",
        "graph_pool_handle": lambda: f"pool of {current[0]}",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None, of=current[0]),
        "graph": graph,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs = CudaGraphs(torch.device("cuda:1"))
    with graphs.capture():
        assert current == [1]
    ((made, pool, stream, device),) = seen
    assert (made.of, pool, stream, device) == (1, "pool of 1", "stream of cuda:1", 1)
    assert current == [0]


def test_what_a_capture_holds_beyond_the_plan() -> None:
    """The libraries' workspaces count: a capture's stream has its own."""
    model = Net()
    plan = planned(model)
    lowering = plan.profiled.lowering
    needed = static_bytes(lowering, plan.program)
    inputs = 8 * 12 * 4
    assert needed > inputs
    assert static_bytes(lowering, plan.program, 1000) == needed + 1000
    reason = why_not(lowering, plan.program, torch.device("cuda"), needed + 999, 1000)
    assert reason is not None
    assert "raise it by 1 bytes" in reason
    assert why_not(lowering, plan.program, torch.device("cuda"), needed + 1000, 1000) is None


def check_on(device: torch.device, cuda_graph: Any) -> None:
    """The same steps, captured and not, on a device."""
    torch.manual_seed(0)
    model, twin = Net().to(device), Net().to(device)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(8, 12).to(device)
    how = {"strategy": "rotor", "place": True, "progress": False, "cache": False}
    module = apply_plan(memopt.plan(model, x, **how), model, cuda_graph=cuda_graph)
    plain = memopt.plan(twin, x, **how).apply(twin)
    for _ in range(WARM_UP + 3):
        x = torch.randn_like(x)
        for one in (module, plain):
            one(x).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.gpu(twin="test_replayed_steps_are_eagers")
def test_on_a_gpu() -> None:
    check_on(torch.device("cuda"), True)

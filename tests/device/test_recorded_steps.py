"""Steps captured with dropout and transfers, recorded by a stand-in for CUDA graphs and replayed
under random delays: eager's bits, by CUDA's rules for captures."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor import handover
from memopt.executor.apply import apply_plan
from memopt.executor.cuda_graph import WARM_UP
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from memopt.step.backend import BACKENDS
from tests.device import accelerator
from tests.device.recorded_graphs import CaptureError, RecordedGraphs, Runtime

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)
STEPS = WARM_UP + 4


class Net(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Dropout(p), nn.Linear(96, 32))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def recorded_streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(BACKENDS[device.type], register_host=None)  # torch pins, which a capture sees
    vars(row)["runtime"] = Runtime(device.type)
    monkeypatch.setitem(BACKENDS, device.type, row)


def planned(model: nn.Module, x: Tensor, **how: Any) -> memopt.Plan:
    how = {"strategy": "offload-graph", "budget": 0.7, "device": LINK, "place": True, **how}
    return memopt.plan(model, x, progress=False, cache=False, **how)


def with_room(plan: memopt.Plan) -> memopt.Plan:
    """The plan without its budget, which leaves no room for a capture's copies."""
    return replace(plan, budget=None)


def steps(module: nn.Module, model: nn.Module, device: torch.device) -> list[Tensor]:
    """Outputs and gradients of six steps on other data each; gradients of two accumulate."""
    found: list[Tensor] = []
    torch.manual_seed(3)
    for step in range(STEPS):
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step)).to(device)
        output = module(x)
        (output.square().sum() * (step + 1)).backward()
        torch.accelerator.synchronize(device)
        found += [output.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        if step % 2:
            model.zero_grad(set_to_none=True)
    return found


def made(device: torch.device) -> tuple[Net, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(256, 32).to(device)
    return model, x, steps(model, model, device)


@pytest.mark.parametrize("delay", [0, 300])
def test_six_steps_with_dropout_and_transfers_are_eagers(delay: int, device: torch.device) -> None:
    model, x, expected = made(device)
    plan = planned(model, x)
    assert plan.program.has_transfers
    assert any(operator.random for operator in plan.graph.operators)
    graphs = RecordedGraphs(device)
    module = apply_plan(with_room(plan), model, cuda_graph=graphs)
    accelerator.delay(delay)
    assert all(map(torch.equal, steps(module, model, device), expected))
    assert (graphs.captures, graphs.replays) == (2, 2 * (STEPS - WARM_UP))
    copying = [{stream for what, stream, _ in r.items if what == "run"} for r in graphs.records]
    assert all(len(streams) > 1 for streams in copying)


def test_copies_under_way_join_a_capture_at_its_end(device: torch.device) -> None:
    swap = StreamSwap(DeviceStreams(device), 4096, device=device)
    tensor = torch.ones(64, device=device)
    kept: list[Any] = []

    def out(join: Any) -> tuple[list[Any], list[Any]]:
        kept.append(swap.out(tensor, 0, swap.lease()))
        join()
        return [], []

    with swap.captured() as join:
        RecordedGraphs(device).capture(lambda: out(join))
    kept[-1].settle()  # outside, where nothing is left to wait for
    with pytest.raises(CaptureError, match="has not joined"), swap.captured():
        RecordedGraphs(device).capture(lambda: out(lambda: None))


@pytest.mark.parametrize("fault", ["no wait", "a pool made inside", "waits for the outside"])
def test_faults_of_a_capture_are_found(
    fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, expected = made(device)
    if fault == "no wait":
        monkeypatch.setattr(DeviceStreams, "wait", lambda *_: None)
    elif fault == "a pool made inside":
        monkeypatch.setattr(StreamSwap, "captured", lambda self: self._streams.captured())
    else:
        monkeypatch.setattr(DeviceStreams, "captured", lambda _: nullcontext(lambda: None))
    module = apply_plan(with_room(planned(model, x)), model, cuda_graph=RecordedGraphs(device))
    accelerator.delay(500)
    if fault == "no wait":
        assert not all(map(torch.equal, steps(module, model, device), expected))
        return
    held = [module(x) for _ in range(WARM_UP)] if fault == "a pool made inside" else []
    reason = "pinned memory" if held else "crosses the boundary"
    with pytest.raises(CaptureError, match=reason):
        steps(module, model, device)


def test_inside_data_parallel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the third step raised ValueError: the chain that hands gradients over ran the
    uncaptured backward on a captured forward."""
    model, x, expected = made(device)
    around = SimpleNamespace(bucket_bytes_cap=4096)
    monkeypatch.setattr(handover, "data_parallel_around", lambda: around)
    module = apply_plan(with_room(planned(model, x)), model, cuda_graph=RecordedGraphs(device))
    assert all(map(torch.equal, steps(module, model, device), expected))


def test_what_a_replay_would_not_do_again_is_refused(device: torch.device) -> None:
    class OnHost(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.made(super().forward(x))

    class Noise(OnHost):
        def made(self, x: Tensor) -> Tensor:
            return x * torch.rand(())

    class Sent(OnHost):
        def made(self, x: Tensor) -> Tensor:
            return x * torch.arange(32.0).to(x.device)

    class Number(OnHost):
        def made(self, x: Tensor) -> Tensor:
            return x * torch.tensor(0.5)

    x = torch.randn(256, 32).to(device)

    def refused(model: nn.Module, reason: str, **how: Any) -> None:
        plan = with_room(planned(model, x, **how))
        with pytest.raises(ValueError, match=reason):
            apply_plan(plan, model, cuda_graph=RecordedGraphs(device))

    refused(Noise().to(device), r"draws random numbers on the host.*device=x\.device")
    refused(Sent().to(device), r"reads a tensor on the host")
    refused(Net().to(device), r"runs twice.*offload-graph", strategy="rotor")
    number = Number(0.0).to(device)
    expected = steps(number, number, device)
    module = apply_plan(with_room(planned(number, x)), number, cuda_graph=RecordedGraphs(device))
    assert all(map(torch.equal, steps(module, number, device), expected))


def test_captures_are_made_in_the_backwards_thread(device: torch.device) -> None:
    model, x, _ = made(device)
    graphs, where = RecordedGraphs(device), []
    capture = graphs.capture

    def noted(run: Any) -> Any:
        where.append(threading.get_ident())
        return capture(run)

    graphs.capture = noted  # type: ignore[method-assign]
    steps(apply_plan(with_room(planned(model, x)), model, cuda_graph=graphs), model, device)
    assert where[0] == threading.get_ident() != where[1]

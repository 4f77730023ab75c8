"""Steps captured with dropout and transfers, recorded by a stand-in for CUDA graphs and replayed
under random delays: eager's bits, by CUDA's rules for captures."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor import apply, graph_segments, handover
from memopt.executor.apply import apply_plan
from memopt.executor.cuda_graph import WARM_UP, between_graphs
from memopt.executor.graph_segments import Segments
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from tests.device import accelerator
from tests.device.recorded_graphs import RecordedGraphs, record_streams
from tests.executor.fake_graphs import CaptureError

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
    record_streams(device, monkeypatch)


def planned(model: nn.Module, x: Tensor, **how: Any) -> memopt.Plan:
    how = {"strategy": "offload-graph", "budget": 0.7, "device": LINK, "place": True, **how}
    return memopt.plan(model, x, progress=False, cache=False, **how)


def with_room(plan: memopt.Plan) -> memopt.Plan:
    """The plan without its budget, which leaves no room for a capture's copies."""
    return replace(plan, budget=None)


def steps(module: nn.Module, model: nn.Module, device: torch.device) -> list[Tensor]:
    """Outputs and gradients of six steps on other data each; gradients of two accumulate."""
    found: list[Tensor] = []
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    for step in range(STEPS):
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step)).to(device)
        if isinstance(model, Scaled):
            model.scale.fill_(1 + step)
        output = module(x)
        (output.square().sum() * (step + 1)).backward()
        torch.accelerator.synchronize(device)
        found += [output.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        if step % 2:
            model.zero_grad(set_to_none=True)
    return found


@functools.lru_cache(1)
def made(device: torch.device) -> tuple[Net, memopt.Plan, list[Tensor]]:
    """A model, a plan that moves tensors, and eager's steps."""
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(256, 32).to(device)
    return model, with_room(planned(model, x)), steps(model, model, device)


@pytest.mark.parametrize("delay", [0, 300])
def test_six_steps_with_dropout_and_transfers_are_eagers(delay: int, device: torch.device) -> None:
    model, plan, expected = made(device)
    assert plan.program.has_transfers
    assert any(operator.random for operator in plan.graph.operators)
    graphs = RecordedGraphs(device)
    module = apply_plan(plan, model, cuda_graph=graphs)
    accelerator.delay(delay)
    assert all(map(torch.equal, steps(module, model, device), expected))
    assert (graphs.captures, graphs.replays) == (2, 2 * (STEPS - WARM_UP))
    copying = [{stream for what, stream, _ in r.items if what == "run"} for r in graphs.records]
    assert all(len(streams) > 1 for streams in copying)


def test_copies_under_way_join_a_capture_at_its_end(device: torch.device) -> None:
    swap = StreamSwap(DeviceStreams(device), 4096, device=device)
    tensor = torch.ones(64, device=device)
    kept: list[Any] = []
    swap.make_pool()
    with swap.captured() as join, RecordedGraphs(device).capture():
        kept.append(swap.out(tensor, 0, swap.lease()))
        join()
    kept[-1].settle()  # outside, where nothing is left to wait for
    swap.make_pool()
    unjoined = pytest.raises(CaptureError, match="has not joined")
    with unjoined, swap.captured(), RecordedGraphs(device).capture():
        kept.append(swap.out(tensor, 0, swap.lease()))


@pytest.mark.parametrize("fault", ["no wait", "a pool made inside", "waits for the outside"])
def test_faults_of_a_capture_are_found(
    fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan, expected = made(device)
    if fault == "no wait":
        monkeypatch.setattr(DeviceStreams, "wait", lambda *_: None)
    elif fault == "a pool made inside":
        monkeypatch.setattr(StreamSwap, "make_pool", lambda _: None)
    else:
        monkeypatch.setattr(DeviceStreams, "captured", lambda _: nullcontext(lambda: None))
    module = apply_plan(plan, model, cuda_graph=RecordedGraphs(device))
    accelerator.delay(500)
    if fault == "no wait":
        assert not all(map(torch.equal, steps(module, model, device), expected))
        return
    x = torch.randn(256, 32).to(device)
    held = [module(x) for _ in range(WARM_UP)] if fault == "a pool made inside" else []
    reason = "pinned memory" if held else "crosses the boundary"
    with pytest.raises(CaptureError, match=reason):
        steps(module, model, device)


def test_inside_data_parallel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the third step raised ValueError: the chain that hands gradients over ran the
    uncaptured backward on a captured forward."""
    model, plan, expected = made(device)
    around = SimpleNamespace(bucket_bytes_cap=4096)
    monkeypatch.setattr(handover, "data_parallel_around", lambda: around)
    module = apply_plan(plan, model, cuda_graph=RecordedGraphs(device))
    assert all(map(torch.equal, steps(module, model, device), expected))


class Noise(Net):
    """Draws on the host, and reads that on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(())) * torch.rand(32).to(x.device)


class Sent(Net):
    """Reads on the device what is always the same on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(0.5)) * torch.arange(32.0).to(x.device)


class Scaled(Net):
    """Reads a number on the host that its user changes, in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.scale).sin()


class Fetched(Net):
    """Fetches what it has computed, and takes it back."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (x.detach().mean().cpu() + 1)


SEGMENTED: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "random numbers of the host": (Noise, {}),
    "a tensor of the host": (Sent, {}),
    "a number that the user changes": (Scaled, {}),
    "a value that is fetched": (Fetched, {}),
    "dropout that runs twice": (Net, {"strategy": "rotor"}),
    "all, and transfers": (Noise, {"strategy": "joint", "time_limit_s": 2}),
}


@functools.lru_cache(1)
def segmented(way: str) -> tuple[Net, memopt.Plan, list[Tensor]]:
    """A model, its plan and eager's steps."""
    torch.manual_seed(0)
    device = torch.device("fake:0")
    kind, how = SEGMENTED[way]
    model, x = kind().to(device), torch.randn(256, 32).to(device)
    expected = steps(model, model, device)
    return model, with_room(planned(model, x, **how)), expected


@pytest.mark.parametrize("way", SEGMENTED)
def test_what_no_graph_repeats_runs_between_two(way: str, device: torch.device) -> None:
    """Before, most of these were refused, and a number on the host stayed what it was when the
    step was captured."""
    model, plan, expected = segmented(way)
    graphs = RecordedGraphs(device)
    module = apply_plan(plan, model, cuda_graph=graphs)
    count = len(between_graphs(plan.profiled.lowering, plan.program))
    for delay in (0, 300):
        accelerator.delay(delay)
        assert all(map(torch.equal, steps(module, model, device), expected))
    assert graphs.captures == count + 2 > 2
    assert graphs.replays == graphs.captures * (2 * STEPS - WARM_UP)


TWICE, FETCHED = "dropout that runs twice", "a value that is fetched"


@pytest.mark.parametrize(
    ("fault", "way", "reason"),
    [
        ("captured", TWICE, "looks at the generator"),
        ("captured", FETCHED, "copies to the host"),
        ("not again", TWICE, ""),
        ("not again", FETCHED, ""),
        ("not written", FETCHED, ""),
        ("too early", FETCHED, ""),
    ],
)
def test_faults_of_segments_are_found(
    fault: str, way: str, reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan, expected = segmented(way)
    if fault == "captured":
        monkeypatch.setattr(apply, "between_graphs", lambda *_: {})
    elif fault == "not again":
        monkeypatch.setattr(graph_segments._Between, "repeated", lambda *_: lambda: None)
    elif fault == "not written":
        monkeypatch.setattr(graph_segments, "_write", lambda *_: None)
    else:  # before the graph that makes what it reads is launched
        monkeypatch.setattr(Segments, "_end", lambda self: (self._join(), self._open.close()))
    module = apply_plan(plan, model, cuda_graph=RecordedGraphs(device))
    if reason:
        with pytest.raises(CaptureError, match=reason):
            steps(module, model, device)
        return
    assert not all(map(torch.equal, steps(module, model, device), expected))


def test_captures_are_made_in_the_backwards_thread(device: torch.device) -> None:
    model, plan, _ = made(device)
    graphs, where = RecordedGraphs(device), []
    capture = graphs.capture

    def noted() -> Any:
        where.append(threading.get_ident())
        return capture()

    graphs.capture = noted  # type: ignore[method-assign]
    steps(apply_plan(plan, model, cuda_graph=graphs), model, device)
    assert where[0] == threading.get_ident() != where[1]

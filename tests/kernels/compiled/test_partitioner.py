"""memopt's choice inside Inductor's own pipeline: a real step within the budget, and refusals."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from benchmarks.steps import peak_of
from memopt.api.solving import solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.integrations import partitioner
from memopt.integrations.partition_graph import kept_by
from memopt.integrations.partition_search import RealStep
from memopt.models.budget import MINIMUM
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.presets import find_device
from memopt.strategies import resolve

WIDTH = 48
DEVICE = find_device("H100")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm(x)), approximate="tanh"))
        return y


def blocks() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(256, WIDTH)


def total_bytes(model: nn.Module, x: Tensor) -> int:
    return x.nbytes + sum(p.nbytes for p in model.parameters())


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_measured_step_keeps_the_budget_and_nothing_is_changed() -> None:
    model, x = blocks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    partitioner = memopt.partitioner(0.75, "rotor", DEVICE)
    run = partitioner.compile(model, x)
    report = partitioner.report
    assert report is not None
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.recomputed > 0
    assert report.predicted_peak_bytes is not None
    assert "measured peak" in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())

    def step() -> None:
        run(x).square().sum().backward()

    measured = total_bytes(model, x) + peak_of(model, step, torch.device("cpu"))
    assert measured <= report.budget_bytes * 1.01  # the loss is the test's own
    step()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    for p, value in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(value, p.grad, rtol=1e-4, atol=1e-3)


class Counting(nn.Module):
    """Changes its input, a parameter and a plain tensor of its own in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, 1), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.add_(1.0)
            self.linear.bias.mul_(0.5)
            self.calls.add_(1.0)
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_what_a_measured_step_writes_to_is_put_back(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code writes without telling anyone."""
    if not compiles:
        monkeypatch.setattr(partitioner, "_compiled", lambda model, *_: model)
    model, x = Counting(), torch.randn(4, WIDTH)
    before = [t.detach().clone() for t in (x, *model.parameters(), model.calls)]
    memopt.partitioner(1.0, "rotor", DEVICE).compile(model, x)
    for value, now in zip(before, (x, *model.parameters(), model.calls), strict=True):
        assert torch.equal(value, now)


def test_a_strategy_that_only_moves_tensors_is_refused_at_once() -> None:
    with pytest.raises(MemoptError, match="moves tensors to the host"):
        memopt.partitioner(0.7, "offload-graph", DEVICE)


def test_a_plan_that_moves_tensors_is_refused() -> None:
    """Whatever strategy made it: those that recompute as well are asked for a plan first."""
    link = Device(to_host_bytes_per_s=1.0)
    graph = random_graph(Random(3), 8)
    plan = solve(graph, MINIMUM, resolve("offload-graph"), device=link)
    with pytest.raises(MemoptError, match="moves tensors to the host"):
        kept_by(plan)


@pytest.mark.slow
def test_a_budget_below_every_plan_is_refused() -> None:
    model, x = blocks()
    with pytest.raises(InfeasibleBudgetError):
        memopt.partitioner(total_bytes(model, x) + 4096, "rotor", DEVICE).compile(model, x)


def choices(
    monkeypatch: pytest.MonkeyPatch, peaks: dict[str, list[int]], seconds: dict[str, float]
) -> None:
    """Choices that take these peaks, one measured after the other, and these times."""
    one: dict[object, partitioner.Partitioner] = {}

    def compiled(model: nn.Module, made: partitioner.Partitioner, _: object) -> object:
        run = object()
        one[run] = made
        made.predicted_peak_bytes = 100
        return run

    monkeypatch.setattr(partitioner, "_compiled", compiled)
    # What is taken is measured once more, as it is handed out.
    measured = {whose: iter([*found, found[-1]]) for whose, found in peaks.items()}
    monkeypatch.setattr(RealStep, "peak_bytes", lambda _, run: next(measured[one[run].whose]))
    monkeypatch.setattr(RealStep, "times_s", lambda _, runs: [seconds[one[r].whose] for r in runs])


def torchs(share: float) -> str:
    return f"torch, activation_memory_budget={share}"


@pytest.mark.parametrize(
    ("seconds", "chosen", "peak"), [(1.0, "memopt", 90), (4.0, torchs(0.8), 100)]
)
def test_the_fastest_choice_that_keeps_the_budget_is_taken(
    seconds: float, chosen: str, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {torchs(s): [p] for s, p in [(1.0, 200), (0.9, 150), (0.8, 100), (0.7, 120), (0.6, 70)]}
    peaks["memopt"] = [130, 90]  # planned again within less, since the first takes too much
    times = {"memopt": seconds, torchs(0.8): 2.0, torchs(0.6): 3.0}
    choices(monkeypatch, peaks, times)
    made = memopt.partitioner(100, "rotor", DEVICE)
    made.compile(*blocks())
    assert made.report is not None
    assert (made.report.chosen, made.report.measured_peak_bytes) == (chosen, peak)
    assert made.report.rounds == 7


def test_where_no_plan_keeps_the_budget_torchs_choice_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [round(1 - part / 10, 1) for part in range(11)]
    peaks = {torchs(share): [200] for share in shares} | {torchs(0.3): [100], "memopt": [200] * 6}
    choices(monkeypatch, peaks, {})
    made = memopt.partitioner(100, "rotor", DEVICE)
    made.compile(*blocks())
    assert made.report is not None
    assert (made.report.chosen, made.report.measured_peak_bytes) == (torchs(0.3), 100)


def test_it_is_named_by_its_budget_and_strategy() -> None:
    names = {
        memopt.partitioner(budget, strategy, DEVICE).uuid()
        for budget in ("1GiB", "2GiB")
        for strategy in ("rotor", "monet")
    }
    assert len(names) == 4
    again = memopt.partitioner("1GiB", "rotor", DEVICE).uuid()
    assert again in names

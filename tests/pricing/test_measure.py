"""Measured costs: one measurement per distinct call, exact workspaces, nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.capture.capture import capture
from memopt.pricing import measure as measuring
from memopt.pricing.cache import ProfileCache
from memopt.pricing.measure import MeasureOptions, costs_of, measure
from memopt.pricing.memory import metered
from memopt.profiler import session
from memopt.profiler.session import profile_model
from memopt.step.build import build
from memopt.step.inputs import to_call
from memopt.step.profiled import Profiled
from memopt.step.signature import call_signature

CPU = torch.device("cpu")
QUICK = MeasureOptions(cap_s=0.2, max_rounds=2)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).softmax(-1))
        return x


def test_each_distinct_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Repeated()
    lowering = build(model, capture(model, to_call(torch.randn(4, 8))))
    seen: list[str] = []
    real = measuring._measure

    def count(missing, *rest):
        seen.extend(s.text for s in missing)
        return real(missing, *rest)

    monkeypatch.setattr(measuring, "_measure", count)
    state = torch.random.get_rng_state()
    graph = measure(lowering, CPU, QUICK)
    assert len(seen) == len(set(seen)) < len(graph.operators)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(o.time_s > 0 for o in graph.operators)
    products = {o.time_s for o in graph.operators if o.target == "aten.addmm.default"}
    assert len(products) == 1


def test_workspace_is_what_a_kernel_takes_for_itself() -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).median(0).values

    model = Sorts()
    lowering = build(model, capture(model, to_call(torch.randn(32, 64))))
    graph = measure(lowering, CPU, QUICK)
    workspaces = {o.target: o.workspace_bytes for o in graph.operators}
    assert workspaces["aten.addmm.default"] == 0
    # The kernel sorts a copy of its input.
    assert workspaces["aten.median.dim"] >= 32 * 64 * 4


def _workspaces(model: nn.Module, given: Tensor) -> dict[str, int]:
    lowering = build(model, capture(model, to_call(given)))
    operators = measure(lowering, CPU, QUICK).operators
    # The first of each kind: a forward's before its backward's.
    return {o.target: o.workspace_bytes for o in reversed(operators)}


def test_results_that_a_step_does_not_ask_for_are_workspace() -> None:
    convolution = nn.Conv2d(4, 4, 2, stride=2)
    convolution.weight.requires_grad_(False)
    found = _workspaces(convolution, torch.randn(4, 4, 5, 6))
    gradient, given = torch.randn(4, 4, 2, 3), torch.randn(4, 4, 5, 6)
    arguments = ([4], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, False, True])
    backward = torch.ops.aten.convolution_backward
    backward(gradient, given, convolution.weight, *arguments)
    with metered(CPU) as use:
        bias = backward(gradient, given, convolution.weight, *arguments)[2]
    assert found["aten.convolution_backward.default"] == use.peak_bytes - bias.nbytes > 0


def test_bags_are_measured_as_if_none_were_empty() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 40))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding_bag(x, self.weight, mode="max")

    found = _workspaces(Bag(), torch.arange(6).reshape(3, 2))
    # Copies of the bags' maxima, which are integers, and of their gradients.
    assert found["aten._embedding_bag_backward.default"] >= 3 * 40 * (8 + 4)


@pytest.mark.parametrize("count", [1, 2, 12])
def test_exponentials_are_measured_for_any_norms(count: int) -> None:
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(x * self.scale)

    found = _workspaces(Exponential(), torch.rand(count, 2, 2))["aten.linalg_matrix_exp.default"]
    for norms in ((10.0, 1e-4), (0.5, 2.0, 10.0), (1e-3,)):
        scales = torch.tensor([*norms, *[10.0] * 12][:count]).reshape(-1, 1, 1)
        given = torch.full((count, 2, 2), 0.5) * scales
        torch.linalg.matrix_exp(given)
        with metered(CPU) as use:
            result = torch.linalg.matrix_exp(given)
        # To a few indices of matrices.
        assert use.peak_bytes - result.nbytes <= found + 16


def test_what_is_read_conjugated_or_negated_is_measured_so() -> None:
    """Kernels copy it first, most of them."""
    aten = torch.ops.aten
    conjugated, weight = torch.randn(2, 6, 6, dtype=torch.complex64)
    calls = (
        (aten.mm.default, (conjugated.conj(), weight)),
        (aten.tanh.default, (torch._neg_view(torch.randn(12, 6)),)),
        (aten.tanh.default, (conjugated.conj(),)),
    )
    for target, arguments in calls:
        (cost,) = costs_of([call_signature(target, arguments, {})], CPU, QUICK, timed=False)
        with metered(CPU) as use:
            result = target(*arguments)
        assert cost.workspace_bytes == use.peak_bytes - result.nbytes > 0, target

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return (x.conj() @ self.weight).abs()

    assert _workspaces(Product(), conjugated)["aten.mm.default"] == conjugated.nbytes


def test_cache_saves_the_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MeasureOptions(cap_s=0.2, max_rounds=2, cache=ProfileCache(tmp_path))
    model, x = Repeated(), torch.randn(4, 8)
    # A busy machine is another matter: its kernels are measured again.
    monkeypatch.setattr(session, "_SUSPICIOUS", float("inf"))
    first = profile_model(model, x, options=options)

    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "_measure", fail)
    second = profile_model(model, x, options=options)
    assert first.graph == second.graph
    assert first.baseline == second.baseline
    with pytest.raises(AssertionError, match="measured again"):
        profile_model(model, x, options=QUICK)


def test_cache_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    memopt.plan(model, x, cache=False, progress=False, strategy="store-all")
    assert not (tmp_path / "cache").exists()
    memopt.plan(model, x, progress=False, strategy="store-all")
    assert (tmp_path / "cache").exists()


def profiled(model: nn.Module, x: Tensor) -> Profiled:
    return profile_model(model, x, options=QUICK)


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    x = torch.randn(4, 6, requires_grad=True)
    kept = torch.ones(6, 6)
    model[0].weight.grad = kept
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    profiled(model, x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(6, 6))
    assert model[0].bias.grad is None
    assert x.grad is None
    assert len(versions) == 7


def test_progress_is_shown() -> None:
    seen: list[tuple[float, str]] = []
    profile_model(
        nn.Linear(6, 6),
        torch.randn(4, 6),
        options=QUICK,
        progress=lambda share, what: seen.append((share, what)),
    )
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("kernels" in what for _, what in seen)


def test_baseline_is_measured() -> None:
    found = profiled(Repeated(), torch.randn(64, 8))
    assert found.baseline.measured
    assert found.baseline.step_time_s > 0
    assert found.baseline.peak_bytes > found.graph.resident_bytes

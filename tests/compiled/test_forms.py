"""Other forms of regions, which read what the forward kept: their values, and plans of them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

import memopt
from benchmarks.steps import peak_of
from memopt.api.plan import Plan
from memopt.implementations import attach, regions, with_implementations
from memopt.implementations.region_choice import forms_of, needed, worthwhile
from memopt.models.graph import Graph, Phase
from memopt.models.variants import variant
from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import Captured, capture
from memopt.profiler.compiled import fuse
from memopt.profiler.compiled.forms import ALL, OPERANDS
from memopt.profiler.compiled.same_bits import SameBits
from memopt.profiler.inputs import Call
from memopt.profiler.session import Profiled

WIDTH, ROWS = 16, 64


class Block(nn.Module):
    """A norm, a product, GPT-2's GELU, whose factors are kept or made again, and a product."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.last, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y.pow(3.0))))
        return x + self.last(self.drop(y))


def network(p: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(p), nn.Linear(WIDTH, 1))


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def captured(p: float) -> tuple[Captured, Lowering]:
    model = network(p).double()
    found = capture(model, Call((inputs().double(),), {}))
    return found, build(model, found)


def test_forms_give_the_values_of_the_step() -> None:
    """Each part, run operator by operator on the step's own values; nothing is compiled."""
    step, lowering = captured(0.0)
    divided = fuse._divided(lowering, set())
    values: dict[Any, Any] = {}

    class Keeping(Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    given = step.module.graph.find_nodes(op="placeholder")
    torch.manual_seed(0)
    Keeping(step.module).run(*(torch.randn(n.meta["val"].shape).double() for n in given))
    wanted = divided.forms(lowering)
    assert {one.name for one in wanted} == {OPERANDS, ALL}
    own = dict(divided.found)
    for one in wanted:
        assert one.part.key != own[one.region].key
        results = GraphModule({}, one.part.graph)(*(values[node] for node in one.part.inputs))
        for node, result in zip(one.part.outputs, results, strict=True):
            torch.testing.assert_close(result, values[node], rtol=1e-10, atol=1e-12)


@functools.cache
def profiled(p: float = 0.2) -> tuple[nn.Module, Profiled]:
    model = network(p)
    return model, memopt.profiler.profile_model(model, inputs(), kernels="compiled")


@pytest.mark.parametrize(
    ("strategy", "chooses"),
    [("rotor", False), pytest.param("rotor-menus", True, marks=pytest.mark.slow)],
)
def test_forms_are_looked_for_where_the_strategy_chooses(strategy: str, chooses: bool) -> None:
    looked: list[bool] = []
    look = fuse._Divided.forms

    def looking(divided: Any, *given: Any) -> Any:
        looked.append(True)
        return look(divided, *given)

    with mock.patch.object(fuse._Divided, "forms", looking):
        memopt.plan(network(0.2), inputs(), budget=0.9, strategy=strategy, kernels="compiled")
    assert bool(looked) == chooses


Share = Callable[[str], float]
"""Of a form's name: its time as a share of that of what it stands in for."""


def priced(share: Share, given: Profiled | None = None) -> Profiled:
    """The profile with forms whose times are given, and whose workspaces are measured."""
    measured = regions.figures

    def figures(graph: Graph, *rest: Any) -> dict[Any, Any]:
        found = measured(graph, *rest)
        for (op, name), one in found.items():
            operator = graph.operators[op]
            backward = operator.phase is Phase.BACKWARD
            compiled = operator.target.startswith("memopt.fused")
            one["time_s"] = operator.time_s * (share(name) if backward and compiled else 1.0)
        return found

    free = mock.patch.object(regions, "byte_s", return_value=0.0)
    with free, mock.patch.object(regions, "figures", figures):
        return with_implementations(given or profiled()[1], exact_only=True)


def chosen(plan: Plan) -> set[tuple[int, str]]:
    runs = (run for _, run in plan.program.computes)
    return {(run.op, run.implementation) for run in runs if run.implementation is not None}


def gradients(model: nn.Module, run: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    output = run(inputs())
    output.square().sum().backward()
    found = [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def peak_bytes(model: nn.Module, run: nn.Module) -> int:
    x = inputs()
    return peak_of(model, lambda: run(x).square().sum().backward(), torch.device("cpu"))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def attached() -> Lowering:
    """A step with its forms; nothing is compiled."""
    step, lowering = captured(0.2)
    made, _ = fuse.planned_regions(step.model() or network(), step, lowering, "compiled", 1)
    return attach(made.lowering, exact_only=True)


class Cosine(torch.autograd.Function):
    """Its backward computes something of the input alone, as a forward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -gradient * x.sin()


class OfTheInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x) * 2, Cosine.apply(x) + 1


def test_forms_read_nothing_that_only_regions_read() -> None:
    """What was an operator of its own, and is made again by its reader now, no longer is there."""
    model = OfTheInput()
    step = capture(model, Call((inputs().requires_grad_(),), {}))
    made, _ = fuse.planned_regions(model, step, build(model, step), "compiled", 1)
    assert "aten.sin.default" not in {str(one.target) for one in made.lowering.nodes}
    assert not forms_of(attach(made.lowering, exact_only=True))


def test_forms_that_are_left_can_be_chosen() -> None:
    """Whatever is left out, what each of the rest needs is there."""
    lowering = attached()
    graph, keys, draw = lowering.graph, set(forms_of(lowering)), random.Random(0)
    assert {name for _, name in keys} == {OPERANDS, ALL}
    assert needed(lowering, keys) == keys
    counts = set()
    for _ in range(50):
        left = needed(lowering, {key for key in keys if draw.random() < 0.7})
        counts.add(len(left))
        figures = {key: variant(graph.operators[key[0]], key[1]) for key in left}
        written = {*graph.producer, *(t for one in figures.values() for t in one.writes)}
        for (op, _), one in figures.items():
            assert set(one.reads) <= written | graph.resident | set(graph.tangents)
            for tensor in set(graph.operators[op].writes) - set(one.writes):
                without = {o for (o, _), x in figures.items() if tensor not in x.reads}
                assert set(graph.readers[tensor]) <= without
    assert len(counts) > 2


def test_a_form_that_cannot_be_compiled_takes_those_that_need_it_along() -> None:
    lowering = attached()
    keys, operators = set(forms_of(lowering)), lowering.graph.operators
    extra = {
        key: set(variant(operators[key[0]], key[1]).writes) - set(operators[key[0]].writes)
        for key in keys
    }
    refused = next(k for k in sorted(keys) if operators[k[0]].phase is Phase.FORWARD and extra[k])
    device = torch.device("cpu")
    with (
        mock.patch.object(regions, "compiled", return_value={refused: "refused"}),
        mock.patch.object(SameBits, "of", return_value=True),
    ):
        left = set(forms_of(regions.usable(lowering, device)))
    reading = {k for k in keys if extra[refused] & set(variant(operators[k[0]], k[1]).reads)}
    assert reading
    assert left == needed(lowering, keys - {refused})
    assert left.isdisjoint({refused, *reading})


@pytest.mark.parametrize(
    ("share", "more", "names"),
    [
        (0.99, 0.0, set()),
        (0.5, 0.0, {OPERANDS, ALL}),
        (0.5, 1.0, {OPERANDS}),  # what writes more in the forward takes longer than is saved
    ],
)
def test_forms_that_save_nothing_are_not_offered(
    share: float, more: float, names: set[str]
) -> None:
    lowering = attached()
    keys = forms_of(lowering)
    operators = []
    for op, one in enumerate(lowering.graph.operators):
        time_s = {Phase.FORWARD: 1.0 + more}.get(one.phase, share)
        choices = (
            replace(choice, time_s=time_s if (op, choice.name) in keys else 1.0)
            for choice in one.implementations
        )
        operators.append(replace(one, time_s=1.0, implementations=tuple(choices)))
    graph, found = worthwhile(replace(lowering.graph, operators=tuple(operators)), lowering)
    assert {name for _, name in forms_of(found)} == names
    assert forms_of(found).keys() == forms_of(replace(lowering, graph=graph)).keys()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rotor-menus", "monet", "joint", "auto"])
@pytest.mark.parametrize("name", [OPERANDS, ALL])
def test_strategies_choose_forms_and_keep_their_promises(strategy: str, name: str) -> None:
    """With memory to spare every form that is faster is chosen, the cheapest of each region."""
    model, plain = profiled()
    given = priced(lambda one: 0.5 if one == name else 0.7)
    kept = gradients(model, memopt.plan(plain, strategy="store-all", progress=False).apply(model))
    plan = memopt.plan(
        given,
        strategy=strategy,
        budget=8 * given.baseline.peak_bytes,
        time_limit_s=20,
        progress=False,
    )
    assert name in {one for _, one in chosen(plan)}
    operators = given.graph.operators
    saved_s = 0.0
    for one in operators:
        times = [c.time_s for c in one.implementations if c.name in (OPERANDS, ALL)]
        saved_s += max([0.0, *(one.time_s - time_s for time_s in times)])
    assert plan.step_time_s == pytest.approx(given.graph.compute_time_s - saved_s, rel=0.01)
    planned = plan.apply(model)
    assert same(gradients(model, planned), kept)
    used_bytes = peak_bytes(model, planned) + plan.resident_bytes
    assert 0.97 * plan.peak_bytes <= used_bytes <= plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rotor-menus", "monet"])
def test_within_a_budget_some_forms_are_chosen(strategy: str, tmp_path: Path) -> None:
    """Between the smallest plan and that of all forms; from a file, too."""
    model, plain = profiled()
    given = priced(lambda _: 0.5)
    kept = gradients(model, memopt.plan(plain, strategy="store-all", progress=False).apply(model))
    most = memopt.plan(given, strategy=strategy, progress=False)
    least = memopt.plan(given, strategy=strategy, budget="min", progress=False)
    between = most.peak_bytes - least.peak_bytes
    times = [least.step_time_s]
    for part in (0.3, 0.6, 0.9):
        budget = least.peak_bytes + round(part * between)
        plan = memopt.plan(given, strategy=strategy, budget=budget, progress=False)
        planned = plan.apply(model)
        assert same(gradients(model, planned), kept)
        used_bytes = peak_bytes(model, planned) + plan.resident_bytes
        assert used_bytes <= plan.peak_bytes <= budget
        times.append(plan.step_time_s)
        plan.save(tmp_path / "plan.json")
        again = memopt.load(tmp_path / "plan.json")
        other = network()
        assert chosen(again) == chosen(plan)
        assert same(gradients(other, again.apply(other)), kept)
    assert times == sorted(times, reverse=True)
    assert 0 < len(chosen(plan)) < len(forms_of(replace(given.lowering, graph=given.graph)))


@pytest.mark.slow
def test_a_form_that_gives_other_bits_is_found() -> None:
    given = priced(lambda _: 0.5)
    lowering = replace(given.lowering, graph=given.graph)
    keys = [key for key, form in forms_of(lowering).items() if form.part is not None]
    key = next(k for k in keys if lowering.graph.operators[k[0]].phase is Phase.BACKWARD)
    twins = dict(regions._twins(lowering, forms_of(lowering)))
    assert twins
    assert SameBits(lowering, keys, twins, torch.device("cpu")).of(*key)
    target: Any = lowering.alternatives[key].target
    own = target.run

    def other(given: list[Any]) -> Any:
        return [torch.nextafter(one, one + 1) for one in own(given)]

    with mock.patch.object(target, "run", other):
        assert not SameBits(lowering, keys, twins, torch.device("cpu")).of(*key)


@pytest.mark.slow
def test_what_atens_kernel_rounds_otherwise_is_not_read_in_its_place() -> None:
    """A GELU between products is a region of one operator and stays ATen's; the kernel of the
    backward that makes its values again for the weight's gradient rounds some of them otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    given = memopt.profiler.profile_model(model, torch.randn(4, 5, 6), kernels="compiled")
    assert "aten.gelu.default" in {one.target for one in given.graph.operators}
    offered = forms_of(attach(given.lowering, exact_only=True))
    assert {name for _, name in offered} == {OPERANDS}
    assert not any(one.implementations for one in priced(lambda _: 0.5, given).graph.operators)


@pytest.mark.slow
def test_strategies_for_chains_compile_no_forms() -> None:
    _, plain = profiled()
    assert plain.lowering.forms
    with mock.patch.object(regions, "compile_parts", side_effect=AssertionError):
        plan = memopt.plan(plain, strategy="rotor", progress=False)
    assert not any(one.implementations for one in plan.graph.operators)


def test_estimates_price_forms_and_compile_nothing() -> None:
    before = dict(fuse._RUNS)
    with torch.device("meta"):
        model, x = network(), torch.randn(4096, WIDTH)
    plan = memopt.plan(
        model,
        x,
        mode="estimate",
        device="H100",
        kernels="compiled",
        strategy="monet",
        budget=None,
        progress=False,
    )
    assert before == fuse._RUNS
    names = {choice.name for one in plan.graph.operators for choice in one.implementations}
    assert names & {OPERANDS, ALL}

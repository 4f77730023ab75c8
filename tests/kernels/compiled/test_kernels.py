"""Compiled kernels: what they compute, what they take, and what plans of them keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph

import memopt
from memopt.kernels.compiled.inductor import compiled
from memopt.profiler import profile_model
from memopt.step.kernel import PREFIX
from memopt.step.region_graph import Subgraph, TensorLayout
from tests.kernels.compiled.same_masks import dropouts_in_kernels, same_masks
from tests.kernels.compiled.steps import (
    WIDTH,
    Block,
    inputs,
    loss_of,
    network,
    peak_bytes,
    step,
    store_all,
)

pytestmark = pytest.mark.xdist_group("compiled store-all")
"""Compilers take seconds for the step that these files share."""


def fused(plan: memopt.Plan) -> list[str]:
    return [one.target for one in plan.graph.operators if one.target.startswith(PREFIX)]


def test_equal_regions_are_one_kernel() -> None:
    _, plan = store_all()
    targets = fused(plan)
    assert len(targets) == 6  # three blocks, forward and backward
    # The last block's dropout is followed by another product: its backward ends otherwise.
    assert len(set(targets)) < len(targets)
    assert sum(one.random for one in plan.graph.operators) == 1
    assert any("same bits" in note for note in plan.notes)


def test_equal_regions_with_dropouts_are_measured_once() -> None:
    """Wherever among the step's seeds theirs are."""
    model = network(depth=4)
    profiled = profile_model(model, inputs(), kernels="compiled")
    lowering = profiled.lowering
    kernels = [one for one in lowering.signatures if str(one.target).startswith(PREFIX)]
    assert len(kernels) == 8
    assert len({one.text for one in kernels}) == len({str(one.target) for one in kernels})


def test_gradients_are_those_of_eager_without_dropout() -> None:
    model, plan = store_all(0.0)
    expected, found = step(model), step(model, plan.apply(model))
    torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-6)
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_masks_that_were_drawn() -> None:
    """The step's own finite differences, with the seed, and so the masks, held."""
    torch.manual_seed(0)
    model = network(depth=1).double()
    x = inputs().double()
    plan = memopt.plan(model, x, strategy="store-all", kernels="compiled", progress=False)
    planned = plan.apply(model)

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return planned(x).square().sum()

    loss().backward()
    weight = model[0].linear.weight
    direction = torch.randn(weight.shape, dtype=weight.dtype)
    slope = float((weight.grad * direction).sum())
    with torch.no_grad():
        weight.add_(direction, alpha=1e-6)
    above = float(loss().detach())
    with torch.no_grad():
        weight.sub_(direction, alpha=2e-6)
    assert (above - float(loss().detach())) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_gradients_are_those_of_eager_whose_dropouts_drop_the_same() -> None:
    model, plan = store_all()
    assert dropouts_in_kernels(plan.graph) == 3
    found = step(model, plan.apply(model))
    with same_masks(plan.graph):
        expected = step(model)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-6)
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(step(model).output, expected.output)  # eager drops others


def test_autocast_of_the_caller_is_not_that_of_the_kernels() -> None:
    """The captured step has its casts; while kernels are made of it there are to be no others."""
    model = network(0.0, depth=1)
    with torch.autocast("cpu", torch.bfloat16):
        plan = memopt.plan(
            model, inputs(), strategy="store-all", kernels="compiled", progress=False
        )
        assert not any("could not be compiled" in note for note in plan.notes)
        found, expected = step(model, plan.apply(model)), step(model)
    assert found.output.dtype == expected.output.dtype
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, rtol=2e-2, atol=2e-2)


def test_share_that_is_dropped_and_its_scale() -> None:
    """What a block adds to its input is silu(linear(x)) / (1 - p), or nothing."""
    block = Block(0.25)
    x = inputs().expand(8, -1, -1).reshape(-1, WIDTH)
    plan = memopt.plan(block, x, strategy="store-all", kernels="compiled", progress=False)
    torch.manual_seed(2)
    added = plan.apply(block)(x).detach() - x
    full = torch.nn.functional.silu(block.linear(x)).detach()
    kept = added.abs() > 1e-6
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(added[kept], (full / 0.75)[kept], rtol=1e-3, atol=1e-5)


def test_the_seed_decides_the_masks() -> None:
    model, plan = store_all()
    planned = plan.apply(model)
    assert step(model, planned, seed=1).same_bits(step(model, planned, seed=1))
    assert not step(model, planned, seed=1).same_bits(step(model, planned, seed=2))


@pytest.mark.parametrize("strategy", ["rotor", "rotor-menus", "monet", "offload-graph", "olla"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_every_plan_has_the_bits_of_its_store_all(strategy: str, share: float) -> None:
    model, first = store_all()
    kept = step(model, first.apply(model))
    least = memopt.plan(first.profiled, budget="min", strategy=strategy, progress=False).peak_bytes
    budget = round(least + share * (first.peak_bytes - least))
    plan = memopt.plan(first.profiled, budget=budget, strategy=strategy, progress=False)
    planned = plan.apply(model)
    assert step(model, planned).same_bits(kept)
    measured = peak_bytes(model, planned) + plan.resident_bytes
    assert measured <= plan.peak_bytes <= budget
    assert measured >= 0.99 * plan.peak_bytes
    assert step(model, plan.apply(model, interpreted=True)).same_bits(kept)


def test_plans_in_files_find_their_kernels(tmp_path: Path) -> None:
    model, first = store_all()
    plan = memopt.plan(first.profiled, budget="min", progress=False)
    plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.record.kernels == "compiled"
    twin = network()
    found = step(twin, loaded.apply(twin, inputs()))
    assert found.same_bits(step(model, first.apply(model)))


def test_whole_steps_run_compiled_kernels() -> None:
    model, twin = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = memopt.plan(
        model,
        inputs(),
        strategy="store-all",
        kernels="compiled",
        loss_fn=loss_of,
        optimizer=optimizer,
        whole_step=True,
        progress=False,
    )
    assert fused(plan)
    torch.manual_seed(3)
    plan.train_step(model, loss_of, optimizer)(inputs())
    _, first = store_all()
    expected = step(twin, first.apply(twin))
    for name, parameter in twin.named_parameters():
        after = parameter.detach() - 0.1 * expected.gradients[name]
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), after)


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_expanded_gradient_arrives_at_a_kernel() -> None:
    """The kernel was run on tensors without data, to see how its results lie: a crash."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sigmoid()), torch.randn(4, 8)
    model(x).sum().backward()
    expected = [one.grad for one in model.parameters()]
    model.zero_grad()
    plan = memopt.plan(model, x, strategy="store-all", kernels="compiled", progress=False)
    assert fused(plan)
    plan.apply(model)(x).sum().backward()
    torch.testing.assert_close([one.grad for one in model.parameters()], expected)


def test_placed_plans_leave_compiled_results_to_the_allocator() -> None:
    model, first = store_all()
    plan = memopt.plan(first.profiled, strategy="rotor", budget="min", place=True, progress=False)
    assert step(model, plan.apply(model)).same_bits(step(model, first.apply(model)))


@pytest.mark.slow
def test_another_shape_is_planned_with_the_same_kernels() -> None:
    model, first = store_all()
    planned = first.apply(model, on_mismatch="plan")
    planned(inputs()[:32]).sum().backward()
    assert planned.calls.replanned == 1
    model.zero_grad(set_to_none=True)


def test_kernels_of_another_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'aten', 'compiled', 'auto'"):
        memopt.plan(nn.Linear(2, 2), torch.ones(1, 2), kernels="triton", progress=False)


def laid_out(strides: tuple[int, ...], more: float) -> Subgraph:
    """A region of one operator, whose result is to have these strides."""
    x = torch.empty(2, 16, 4)
    graph = Graph()
    given = graph.placeholder("in0")
    turned = graph.call_function(torch.ops.aten.transpose.int, (given, 1, 2))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (turned, more)),))
    result = TensorLayout((2, 4, 16), strides, torch.float32, x.device)
    return Subgraph(graph, (), (), (), (TensorLayout.of(x),), (result,), (), str(strides))


@pytest.mark.slow
def test_results_are_laid_out_as_they_are_to_be() -> None:
    """Inductor leaves a pointwise result as its operand lies."""
    more = torch.rand(()).item()  # not compiled before
    x = torch.randn(2, 16, 4)
    for strides in ((64, 1, 4), (64, 16, 1)):
        made = compiled({"one": laid_out(strides, more)}, lambda *_: None)["one"]
        assert callable(made)
        (found,) = made([x.clone()])
        assert found.stride() == strides
        torch.testing.assert_close(found, x.transpose(1, 2) + more)

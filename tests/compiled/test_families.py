"""Compiled kernels on the model families: bits, peaks and, without dropout, eager's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks.steps import peak_of
from memopt.profiler.build import build
from memopt.profiler.capture import capture
from memopt.profiler.compiled import fuse
from memopt.profiler.compiled.kernel import FusedKernel
from memopt.profiler.compiled.replace import with_kernels
from memopt.profiler.training_call import training_call
from tests.zoo import FAMILIES, Family, call

NAMES = [one.name for one in FAMILIES]


def gradients(family: Family, model: nn.Module, run: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Gradients of one step from one state, which is put back."""
    state = copy.deepcopy(model.state_dict())
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    family.loss(call(run, inputs)).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_plans_have_the_bits_of_their_store_all(family: Family) -> None:
    model, inputs = family.build("tiny"), family.inputs("tiny")
    first = memopt.plan(
        model,
        inputs,
        strategy="store-all",
        kernels="compiled",
        loss_fn=family.loss,
        progress=False,
    )
    kept = gradients(family, model, first.apply(model), inputs)
    if "dropout" not in family.tags:
        expected = gradients(family, model, model, inputs)
        largest = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            scale = max(float(value.abs().max()), largest / 1000)
            assert float((kept[name] - value).abs().max()) <= 1e-3 * scale, name
    for strategy in ("rotor", "offload-graph"):
        floor = memopt.plan(first.profiled, budget="min", strategy=strategy, progress=False)
        for share in (0.0, 0.25, 0.5):
            least = floor.peak_bytes
            budget = round(least + share * max(0, first.baseline.peak_bytes - least))
            plan = memopt.plan(first.profiled, budget=budget, strategy=strategy, progress=False)
            planned = plan.apply(model)
            found = gradients(family, model, planned, inputs)
            assert all(torch.equal(found[name], value) for name, value in kept.items())

            def step(planned: nn.Module = planned) -> None:
                family.loss(call(planned, inputs)).backward()

            peak = peak_of(model, step, torch.device("cpu")) + plan.resident_bytes
            assert peak <= plan.peak_bytes <= budget


@pytest.mark.parametrize("name", ["mlp", "unet", "vit_b_16", "llama"])
def test_regions_are_a_graph_without_cycles(name: str) -> None:
    """Nothing is compiled: the step with regions in it is one that can be built."""
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build("tiny")
    captured = capture(model, training_call(model, family.inputs("tiny")))
    lowering = build(model, captured)
    found = fuse._regions(lowering, set())
    inside = sum(len(region.operators) for region, _ in found)
    kernels = [(region, one, FusedKernel(one.key)) for region, one in found]
    made = build(model, with_kernels(captured, lowering, kernels))
    assert made.graph.resident_bytes == lowering.graph.resident_bytes
    assert len(made.graph.operators) <= len(lowering.graph.operators) - inside + len(found) + 1
    assert len({one.key for _, one in found}) < len(found)
    named = {tensor.name for tensor in made.graph.tensors}
    assert len(made.graph.gradients) == len(lowering.graph.gradients)
    assert named

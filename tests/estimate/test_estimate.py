"""Estimates of real models: nothing computed, the same graph, plans that run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.fake import Fakes
from memopt.models.presets import CPU_CORE, H100
from memopt.pricing.baseline import measure_loss
from memopt.pricing.memory import metered
from memopt.profiler import Loss, estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.inputs import to_call
from tests.zoo import call, get

CPU = torch.device("cpu")
FAMILIES = [
    "mlp",
    "vgg16",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("unet", "resnet50", "gpt2", "vit_b_16")
    ),
]


class Tied(nn.Module):
    """Tied and frozen parameters, a buffer, and a tensor that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))
        self.plain = torch.full((8,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale + self.plain


def test_stand_ins_have_no_storage_and_the_model_keeps_its_own() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fakes = Fakes()
    copy = fakes.model(model)
    assert all(type(t).__name__ == "FakeTensor" for t in [*copy.parameters(), *copy.buffers()])
    assert copy.second.weight is copy.first.weight
    assert type(copy.plain).__name__ == "FakeTensor"
    assert isinstance(copy.first.weight, nn.Parameter)
    assert not copy.second.bias.requires_grad
    assert model.first.weight is model.second.weight
    assert fakes.tensor(model.scale) is copy.scale
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_real_model_is_not_copied_or_run() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    with metered(CPU) as use:
        estimate_model(model, torch.empty(4, 1024), CPU_CORE)
    assert use.peak_bytes < 2**20
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_the_real_models_and_its_peak_within_two_percent(family: str) -> None:
    chosen = get(family)
    model, inputs = chosen.build("tiny"), chosen.inputs("tiny")
    with torch.device("meta"):
        shape_only = chosen.make("tiny")
    profiled = estimate_model(shape_only, inputs, CPU_CORE)
    planned = memopt.plan(profiled, strategy="store-all", progress=False)
    # Applying captures the real model and compares the graphs.
    module = planned.apply(model)

    def step() -> None:
        output = call(module, inputs)
        tensor = output if torch.is_tensor(output) else output.logits
        tensor.backward(torch.ones_like(tensor))

    step()
    for parameter in model.parameters():
        parameter.grad = None
    with metered(CPU) as use:
        step()
    measured = profiled.graph.resident_bytes + use.peak_bytes
    assert planned.peak_bytes == pytest.approx(measured, rel=0.02)


def test_meta_and_real_parameters_give_the_same_graph() -> None:
    with torch.device("meta"):
        shape_only = get("mlp").make("tiny")
    inputs = get("mlp").inputs("tiny")
    real = estimate_model(get("mlp").build("tiny"), inputs, CPU_CORE)
    assert estimate_model(shape_only, inputs, CPU_CORE).graph == real.graph


@pytest.mark.parametrize("device", [CPU_CORE, H100], ids=lambda d: d.name)
def test_an_estimated_plan_runs_on_a_real_model(device: memopt.Device) -> None:
    chosen = get("vit_b_16")
    model, inputs = chosen.build("tiny"), chosen.inputs("tiny")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.device("meta"):
        shape_only = chosen.make("tiny")
    for module in shape_only.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plan = memopt.plan(
        shape_only,
        inputs,
        budget="min",
        strategy="rotor",
        device=device,
        mode="estimate",
        progress=False,
    )
    assert plan.overhead > 0
    planned = plan.apply(model)
    chosen.loss(call(planned, inputs)).backward()
    found = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    chosen.loss(call(model, inputs)).backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_the_loss_is_charged_as_measured() -> None:
    model, inputs = nn.Linear(16, 4096), torch.rand(64, 16)
    targets = torch.randint(0, 4096, (64,))
    loss = Loss(nn.functional.cross_entropy, (targets,))
    measured = measure_loss(model, to_call(inputs), loss, CPU).boundary_bytes
    estimated = estimate_model(model, inputs, CPU_CORE, loss=loss).graph.boundary_bytes
    assert estimated == pytest.approx(measured, rel=0.02)


def test_the_capacity_is_the_budget_and_a_refusal_shows_the_sum() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to(torch.bfloat16)
    inputs = torch.empty(8, 1024, dtype=torch.bfloat16)
    small = dataclasses.replace(H100, capacity_bytes=92 * 2**20)

    def planned(optimizer: str) -> memopt.Plan:
        return memopt.plan(
            model, inputs, device=small, mode="estimate", optimizer=optimizer, progress=False
        )

    fitting = planned("adamw-8bit")
    assert fitting.budget == small.capacity_bytes
    assert any("adamw-8bit state" in note for note in fitting.notes)
    state = 2 * (2**20 + 4 * 2**12) * 2 + 2 * 8 * 1024
    assert fitting.resident_bytes - planned("sgd").resident_bytes == state
    with pytest.raises(memopt.InfeasibleBudgetError, match=r"master parameters \(fp32\) 8.0 MiB"):
        planned("adamw-fp32")


def test_arguments_that_do_not_go_together() -> None:
    model, inputs = nn.Linear(2, 2), torch.empty(2, 2)
    with pytest.raises(ValueError, match="needs the device to estimate for"):
        memopt.plan(model, inputs, mode="estimate")
    with pytest.raises(ValueError, match='mode is "measure" or "estimate"'):
        memopt.profile(model, inputs, mode="guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown device"):
        memopt.plan(model, inputs, device="abacus", mode="estimate")


def test_profile_estimates_too() -> None:
    graph = memopt.profile(
        nn.Linear(4, 4), torch.empty(2, 4), device="H100", mode="estimate", progress=False
    )
    assert graph.compute_time_s > 0
    assert all(tensor.size_bytes % 512 == 0 for tensor in graph.tensors)
    assert replay(graph, store_all(graph)).peak_bytes > 64 * 2**20


def test_a_loss_that_the_model_returns() -> None:
    """The loss function only picks an output, as for Hugging Face models given labels."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.linear(x)
            return {"loss": y.square().mean(), "logits": y}

    inputs, device = torch.ones(4, 8), memopt.Device(flops_per_s={"float32": 1e9})
    planned = {
        loss_fn: memopt.plan(
            Both(), inputs, mode="estimate", device=device, loss_fn=loss_fn, progress=False
        )
        for loss_fn in (None, lambda output: output["loss"])
    }
    bare, picked = planned.values()
    assert picked.peak_bytes <= bare.peak_bytes
    assert "gradients of 128 B" in " ".join(bare.notes)
    assert "gradients of" not in " ".join(picked.notes)


def test_inputs_without_values_take_no_memory() -> None:
    """A batch of 4 TiB can be estimated anywhere."""
    with torch.device("meta"):
        model, x = nn.Linear(2**20, 1), torch.zeros(2**20, 2**20)
    graph = memopt.profile(model, x, device="H100", mode="estimate", progress=False)
    assert graph.resident_bytes > 2**42

"""Captured steps of the zoo's models at their published sizes, priced and kept in out/graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from benchmarks.shapes import WithLoss
from benchmarks.table import captured
from memopt.kernels import with_implementations
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph, Phase
from memopt.models.presets import find_device
from memopt.pricing.measure import with_costs
from memopt.pricing.roofline import estimate_costs
from memopt.profiler.estimate import estimate_model
from memopt.profiler.step_capture import capture_step, with_updates
from memopt.reductions.linearize import linearize
from memopt.step.inputs import to_call
from memopt.step.loss import Loss
from tests import zoo

FOLDER = Path("out/graphs")
BATCH = 32
"""Of `step_graph`."""
LOSS = "+loss"
V100, ROTOR_BATCH = find_device("V100-PCIe"), 8
"""Of `chain_of`: the GPU of Rotor's and Offloading's experiments, the largest batch of Rotor's."""
A100 = find_device("A100")
"""Of `updated_graph`: the GPU of OLLA §5.1 (there with 40 GB)."""


def step_graph(name: str, device: Device) -> Graph:
    """Capture a model's step with its exact implementations, BATCH examples, priced for a device.
    "NAME+loss": with its loss inside, so that the logits are the plan's to free."""

    def make() -> Graph:
        family = zoo.get(name.removesuffix(LOSS))
        with torch.device("meta"):
            model = family.build("paper")
        if name.endswith(LOSS):
            model = WithLoss(model, family.loss)
        profiled = estimate_model(model, family.inputs("paper", batch=BATCH), device)
        return with_implementations(profiled, exact_only=True, device=device).graph

    return captured(FOLDER / f"{device.name}-{name}-b{BATCH}-exact.json", Graph, make)


def chain_of(name: str, pixels: int, batch: int = ROTOR_BATCH) -> Chain:
    """Capture the chain of a model's step of square images, estimated for the V100."""

    def make() -> Chain:
        family = zoo.get(name)
        with torch.device("meta"):
            model = family.build("paper")
        images = torch.zeros(batch, 3, pixels, pixels)
        graph = memopt.profile(model, images, device=V100, mode="estimate", progress=False)
        return linearize(graph).chain

    return captured(FOLDER / f"chain-{name}-{pixels}-b{batch}.json", Chain, make)


def updated_graph(name: str, batch: int) -> Graph:
    """Capture a training step, forward, loss, backward and an update of every parameter (plain SGD,
    which works in place), priced for the A100; nothing is computed."""

    def make() -> Graph:
        family = zoo.get(name)
        with torch.device("meta"):
            model = family.build("paper")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model.to_empty(device="cpu")
            call = to_call(family.inputs("paper", batch=batch))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            parts = capture_step(model, call, Loss(family.loss), optimizer, A100.block_bytes)
            priced = with_costs(parts.lowering, estimate_costs(parts.lowering, A100))
            _, whole = with_updates(parts, parts.lowering, {})
        updates = [x for x in whole.graph.operators if x.phase is Phase.UPDATE]
        operators = (*priced.operators, *updates)
        return replace(priced, operators=operators, gradients=whole.graph.gradients)

    return captured(FOLDER / f"updated-{name}-b{batch}.json", Graph, make)

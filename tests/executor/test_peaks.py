"""The replayed peak of a program is the peak that its step is measured at."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.executor.out_variants import for_placing
from memopt.pricing.measure import MeasureOptions
from memopt.pricing.memory import metered
from memopt.profiler.session import profile_model
from memopt.programs.replay import replay
from memopt.step.backend import backend_of
from memopt.step.inputs import to_call
from memopt.step.loss import Loss
from memopt.user_code.restored_state import state_restored
from tests.executor.harness import PROGRAMS, Prepared

TOLERANCE = 0.005


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4)
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 256, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LossAndLogits(nn.Module):
    """As Hugging Face models: the loss is made inside, and the logits are returned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layer(self.embedding(tokens)))
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
            "x": logits,
        }


def class_loss(output: Tensor) -> Tensor:
    targets = torch.arange(output.shape[0]) % output.shape[1]
    return functional.cross_entropy(output, targets)


WEIGHTS = torch.randn(64, 512)

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[..., Tensor]]] = {
    "perceptron": (Perceptron, lambda: torch.randn(512, 64), class_loss),
    "images": (Images, lambda: torch.randn(8, 3, 32, 32), class_loss),
    "sum-of-squares": (Perceptron, lambda: torch.randn(512, 64), lambda y: y.square().sum()),
    # The tangent arrives transposed, and autograd's copy of it in the output's layout is charged.
    "transposed": (
        Perceptron, lambda: torch.randn(512, 64), lambda y: (y.t() * WEIGHTS).sum()
    ),
    "loss-and-logits": (
        LossAndLogits, lambda: torch.randint(0, 500, (8, 32)), lambda y: y["loss"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_predicted_is_measured(case: str) -> None:
    make, inputs, function = CASES[case]
    torch.manual_seed(0)
    model, x = make(), inputs()
    options = MeasureOptions(cap_s=0.2, max_rounds=1)
    profiled = for_placing(profile_model(model, x, loss=Loss(function), options=options))
    graph = replace(profiled.lowering.graph, allocator_owned=profiled.graph.allocator_owned)
    prepared = Prepared(model, profiled.captured, replace(profiled.lowering, graph=graph))
    resident = profiled.graph.resident_bytes - backend_of("cpu").step_scalars_bytes
    for name, make_program in PROGRAMS.items():
        program = make_program(profiled.graph)
        timeline = replay(profiled.graph, program)
        predicted = timeline.placed_peak_bytes or timeline.peak_bytes
        planned = prepared.planned(program)
        peak = measured_peak(planned, x, function)
        assert abs(resident + peak - predicted) <= TOLERANCE * predicted, (
            f"{name}: measured {resident + peak}, predicted {predicted}"
        )


def measured_peak(module: nn.Module, x: Tensor, function: Callable[..., Tensor]) -> int:
    """Peak bytes of one step above its start, the second of two."""

    def step() -> Any:
        module.zero_grad()
        gc.collect()
        with metered(torch.device("cpu")) as use:
            output = module(x)
            function(output).backward()
        del output
        return use.peak_bytes

    with state_restored(module, to_call(x)):
        step()
        return int(step())

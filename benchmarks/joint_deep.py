"""Joint plans of deep models of equal layers: planning time against depth (estimated).

GPT-2 (the width of the published one) and the shape of Llama 2 70B, in bfloat16 on `meta`, the loss
inside the step, sequences of 1,024 tokens. Budgets are resident bytes and gradients, which stay, +
share x what store-all needs beyond them. Seconds are CPU time, the capture's apart from planning;
a machine with other work stretches limits as `joint_tables` does.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks.joint_tables import pace
from benchmarks.runner import Benchmark, Line
from benchmarks.shapes import gpt2_of, llama
from benchmarks.table import NONE, signed
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.kernels import with_implementations
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import resolve
from memopt.strategies.joint.equal_layers import EqualLayers
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

SEQUENCE = 1024
BATCHES = {"gpt2": 32, "llama-70b": 16}


class LossOnly(nn.Module):
    """A language model whose only output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the mean loss of predicting each next token."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def _captured(name: str, layers: int, device: Device) -> Graph:
    with torch.device("meta"):
        deep = gpt2_of(n_layer=layers) if name == "gpt2" else llama("llama-2-70b", layers=layers)
        model = LossOnly(deep.train().to(torch.bfloat16))
        tokens = torch.zeros(BATCHES[name], SEQUENCE, dtype=torch.long)
    profiled = estimate_model(model, (tokens,), device)
    return with_implementations(profiled, exact_only=True, device=device).graph


def _planned(given: Any, name: str, layers: int) -> list[Line]:
    device, begin = find_device(given.device), time.process_time()
    graph = _captured(name, layers, device)
    capture_s = time.process_time() - begin
    base = replay(graph, store_all(graph))
    fixed = graph.resident_bytes + sum(graph.tensors[t].size_bytes for t in graph.gradients)
    rows = []
    for share in given.shares:
        budget = fixed + int(share * (base.peak_bytes - fixed))
        begin, wall = time.process_time(), time.perf_counter()
        figures = [NONE] * 3
        limit_s = pace().stretch * given.limit
        try:
            plan = solve(graph, budget, resolve("joint"), device=device, time_limit_s=limit_s)
        except MemoptError as error:
            source = str(error)
        else:
            over, gap = (plan.step_time_s / x - 1 for x in (base.time_s, plan.lower_bound_s))
            folded_s, source = plan.stats.get("folded_cpu_s"), str(plan.stats["source"])
            folded = NONE if folded_s is None else f"{folded_s:.0f}"
            figures = [signed(over), f"{gap:.1%}", folded]
        planning_s = time.process_time() - begin
        pace().note(planning_s, time.perf_counter() - wall)
        figures.insert(2, f"{planning_s:.0f}")
        sizes = f"{len(graph.operators)} | {EqualLayers(graph).distinct} | {capture_s:.0f}"
        where = f"{name} | {layers} | {sizes} | .{round(100 * share):02d}"
        rows.append(Line(f"{where} | {' | '.join(figures)} | {source}"))
    return rows


BENCHMARK = Benchmark(
    cases=lambda given: {
        f"{name} {layers}": (name, layers) for name in BATCHES for layers in given.layers
    },
    measure=_planned,
    head="model | layers | operators | distinct | capture, s | share | step | gap | planning, s | "
    "folded, s | from",
    selects=("layers",),
    options={"layers": (10, 20, 40, 80), "shares": (0.40, 0.25), "limit": 60.0, "device": "H100"},
)

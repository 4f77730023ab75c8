"""A small model, real plan files of it, and the figures somebody who means harm would write."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.api.plan import Plan
from memopt.errors import MemoptError
from memopt.executor.check import loss_of
from memopt.files import plan_file
from memopt.models.budget import Budget
from memopt.models.codec import read
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.reader import Reader
from memopt.models.record import ANY_LOSS
from memopt.models.same_graph import as_captured
from memopt.pricing.memory import metered
from memopt.programs.instructions import Program
from memopt.programs.serialize import fingerprint
from memopt.reductions.validate_and_replay import validate_and_replay

CPU = torch.device("cpu")


class Model(nn.Module):
    """Something to overwrite, to draw, to move and to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(32, 16))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm((self.first(x) * self.scale).relu()).sigmoid()
        out: Tensor = self.last(functional.dropout(x, 0.5).exp())
        return out


def decode(reader: Reader) -> Plan:
    """The plan of a file's content."""
    return Plan.of(plan_file.decode(reader))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def inputs() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, module: nn.Module) -> tuple[list[Tensor], int]:
    """What a step leaves behind, the model's own tensors too, and its peak."""
    x = inputs()
    model.zero_grad(set_to_none=True)
    for buffer in model.buffers():
        buffer.zero_()
    torch.manual_seed(3)
    with metered(CPU) as use:
        output = module(x)
        loss_of(output, None, (), ANY_LOSS).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [output, *gradients, *model.parameters(), *model.buffers()]
    return [value.detach().clone() for value in found], use.peak_bytes


def plan(strategy: str, **options: Any) -> Plan:
    return memopt.plan(build(), inputs(), strategy=strategy, progress=False, **options)


MADE: dict[str, Callable[[], Plan]] = {
    "rotor": lambda: plan("rotor", budget="min"),
    "placed": lambda: plan("store-all", place=True),
    "offload-graph": lambda: plan("offload-graph", budget="min"),
    "rotor-menus": lambda: plan("rotor-menus", budget="min"),
}


def refigured(value: Any) -> Any | None:
    """The same with the figures, budget and fingerprint that its own graph and program have, as
    somebody who means harm would write them; None if it has none."""
    changed = copy.deepcopy(value)
    try:
        graph = read(Graph, Reader(changed["graph"], ""))
        program = read(Program, Reader(changed["program"], ""))
        device = read(Device, Reader(changed["device"], ""))
        violation, figures = validate_and_replay(graph, program, Budget(), device)
        structure = as_captured(graph, tuple(map(tuple, changed["record"].get("resized", ()))))
    except (MemoptError, ValueError, IndexError, TypeError, KeyError):
        return None
    if violation is not None or not math.isfinite(figures.time_s):
        return None
    changed["figures"] = {
        "peak_bytes": figures.peak_bytes,
        "step_time_s": figures.time_s,
        "host_peak_bytes": figures.host_peak_bytes,
    }
    changed["lower_bound_s"] = 0.0
    if changed["budget_bytes"] is not None:
        changed["budget_bytes"] = figures.peak_bytes
    changed["record"]["fingerprint"] = fingerprint(structure)
    return changed

"""Popular architectures, trained plain and wrapped: what the tests of them, and
`benchmarks.trainer_architectures`' page, compare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from benchmarks.steps import gradients, timed
from memopt.errors import MemoptError
from tests.users.architectures import ARCHITECTURES, Architecture

STEPS = (1, 1, 2)
"""Micro-batches of each step."""


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Name the first thing that is not the same, bit for bit; "" if all is."""
    if one.keys() != other.keys():
        return ", ".join(sorted(one.keys() ^ other.keys()))
    for name, value in one.items():
        if value.dtype != other[name].dtype or not torch.equal(value, other[name]):
            return name
    return ""


def trained(architecture: Architecture, model: nn.Module) -> dict[str, Tensor]:
    """Train three steps, the last of two micro-batches: losses, and what the model holds then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, Tensor] = {}
    calls = 0
    for step, batches in enumerate(STEPS):
        optimizer.zero_grad()
        for _ in range(batches):
            torch.manual_seed(calls)
            loss = architecture.loss(model(**architecture.inputs()))
            (loss / batches).backward()
            found[f"the loss of call {calls}"] = loss.detach().clone()
            calls += 1
        for name, grad in gradients(model).items():
            found[f"gradient of {name} in step {step}"] = grad
        for name, b in model.named_buffers():
            found[f"buffer {name} in step {step}"] = b.clone()
        optimizer.step()
    for name, p in model.named_parameters():
        found[f"parameter {name}"] = p.detach().clone()
    return found


@dataclass(frozen=True)
class Row:
    """How one architecture fared: "exact", "refused" with its sentence, or what is wrong; the
    budget "min" as a share of the peak without a plan; seconds of the wrapped training."""

    name: str
    kind: str
    outcome: str
    sentence: str = ""
    share: float = 0.0
    seconds: float = 0.0


def sentence(error: Exception) -> str:
    """Write what an error says, without where this machine keeps its packages."""
    return re.sub(r"\S*/site-packages/", "", str(error))


def without_cache(model: nn.Module) -> nn.Module:
    """Let a model return no keys and values, as the plan says that its steps do: eager copies
    them, and attention's products round otherwise with the copies' strides on some processors."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return model


def outcome_of(architecture: Architecture) -> Row:
    """Train plain and wrapped."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return architecture.model().train()

    plain = trained(architecture, without_cache(model()))
    wrapped: Any = memopt.wrap(model(), "min", progress=False)
    try:
        planned, seconds, _ = timed(lambda: trained(architecture, wrapped))
    except MemoptError as error:
        return Row(architecture.name, architecture.kind, "refused", sentence(error))
    calls, plan = wrapped.calls, wrapped.memopt.plans[0]
    if differs := difference(planned, plain):
        outcome = f"differs: {differs}"
    elif (calls.planned, calls.original, calls.replanned) != (sum(STEPS), 0, 0):
        outcome = f"not planned: {calls}"
    else:
        outcome = "exact"
    share = plan.peak_bytes / plan.baseline.peak_bytes
    return Row(architecture.name, architecture.kind, outcome, share=share, seconds=seconds)


def rows_of(name: str) -> list[Row]:
    """Train an architecture as it is, and, if that is refused, remedied."""
    architecture = next(one for one in ARCHITECTURES if one.name == name)
    row = outcome_of(architecture)
    if row.outcome != "refused" or architecture.remedy is None:
        return [row]
    return [row, outcome_of(architecture.remedy)]

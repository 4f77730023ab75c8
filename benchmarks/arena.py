"""Whole steps run at planned addresses: equality, coverage, peak and time.

Every family trains three steps under OLLA's plan with SGD-momentum and with AdamW, and must end
with eager's loss, parameters, buffers and optimizer state, bit for bit. Time: the same program
with and without its addresses, in turn.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memopt
from benchmarks.runner import Benchmark, Line, OneOf, crossed
from benchmarks.steps import CPU
from benchmarks.table import interleaved, mib, ratio
from memopt.api.plan import Plan
from memopt.pricing.memory import metered
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.step.inputs import Call, to_call
from memopt.strategies.olla import Olla
from tests.zoo import Family, get

FAMILIES = ("resnet50", "vgg16", "mobilenet_v2", "gpt2", "bert", "llama", "vit_b_16")
OPTIMIZERS = ("momentum", "adamw")
STEPS = 3


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.001)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], torch.Tensor]
) -> tuple[list[torch.Tensor], int]:
    """Train: the bytes of all that is left, losses among it, and the last step's peak."""
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        with metered(CPU) as use:
            losses.append(step())
    # Updates are made in another order than eager's.
    states = sorted(optimizer.state_dict()["state"].items())
    left = tree_leaves([model.state_dict(), states, losses])
    bits = [torch.as_tensor(one).contiguous().reshape(-1).view(torch.uint8) for one in left]
    return bits, use.peak_bytes


def eager(family: Family, kind: str, size: Any, call: Call) -> list[torch.Tensor]:
    """Train three eager steps, and give what they leave."""
    model = family.build(size)
    optimizer = optimizer_of(kind, model)

    def step() -> torch.Tensor:
        loss = family.loss(model(*call.args, **call.kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(model, optimizer, step)[0]


def measured(given: Any, name: str, kind: str) -> list[Line]:
    """Plan, train, compare, and time one family."""
    family = get(name)
    inputs = family.inputs(given.size, batch=given.batch)
    call = to_call(inputs)
    expected = eager(family, kind, given.size, call)
    gc.collect()
    model = family.build(given.size)
    optimizer = optimizer_of(kind, model)
    plan, at_any_cost = placed_plan(family, model, optimizer, inputs)
    bare = Program(plan.program.instructions)
    steps = {
        way: partial(one.train_step(model, family.loss, optimizer), *call.args, **call.kwargs)
        for way, one in (("with", plan), ("without", replace(plan, program=bare)))
    }
    found, peak_bytes = trained(model, optimizer, steps["with"])
    equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
    times = interleaved(model, steps, given.rounds, CPU)
    planned = plan.peak_bytes - plan.resident_bytes
    liveness = replay(plan.graph, bare).peak_bytes - plan.resident_bytes
    line = (
        f"{name}{'*' * at_any_cost} | {kind} | {plan.arena.coverage:.1%} | "
        f"{mib(plan.arena.arena_bytes)} | {mib(planned)} | {mib(peak_bytes)} | "
        f"{peak_bytes / planned:.4f} | {mib(liveness)} | {planned / liveness - 1:.1%} | "
        f"{'yes' if equal else 'NO'} | {statistics.median(times['with']):.3f} | "
        f"{ratio(times, 'with', 'without'):.3f} | {outside(plan)}"
    )
    return [Line(line, "" if equal else f"{name}, {kind}: not eager's bits")]


def placed_plan(
    family: Family, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any
) -> tuple[Plan, bool]:
    """OLLA's plan; where its addresses would cost too much, the one that has them all the same."""
    for strategy in (Olla(), Olla(arena_cost=None)):
        how = {"loss_fn": family.loss, "optimizer": optimizer, "progress": False}
        plan = memopt.plan(model, inputs, strategy=strategy, **how)
        if plan.arena is not None:
            break
    return plan, strategy.arena_cost is None


def outside(plan: Plan) -> str:
    """The kernels outside the arena, and their share of the bytes written."""
    use = plan.arena
    total = use.covered_bytes + use.outside_bytes
    return ", ".join(
        f"{kernel.target.removeprefix('aten.').removesuffix('.default')} "
        f"{kernel.bytes_written / total:.1%}"
        for kernel in use.outside
        if kernel.bytes_written >= 0.001 * total
    )


BENCHMARK = Benchmark(
    cases=crossed(FAMILIES, OPTIMIZERS),
    measure=measured,
    head="model | optimizer | coverage | arena | planned | measured | / planned | liveness | "
    "planned above it | equal | step s | time | outside the arena, of the bytes written",
    options={"size": OneOf(("tiny", "paper")), "batch": 4, "rounds": 9},
)

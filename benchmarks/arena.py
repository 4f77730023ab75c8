"""Whole steps run at planned addresses: equality, coverage, peak and time.

Every family trains three steps under OLLA's plan with SGD-momentum and with AdamW, and must end
with eager's loss, parameters, buffers and optimizer state, bit for bit. Time: the same program
with and without its addresses, in turn.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.runner import Benchmark, Line, OneOf
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


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest of dicts and lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):  # updates are made in another order than eager
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> str:
    """Of every bit that training has left."""
    found = hashlib.blake2b()
    for tensor in tensors([model.state_dict(), optimizer.state_dict()["state"], losses]):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def eager(family: Family, kind: str, size: Any, call: Call) -> str:
    """Train three eager steps, and digest what they leave."""
    model = family.build(size)
    optimizer = optimizer_of(kind, model)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = family.loss(model(*call.args, **call.kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
    return digest(model, optimizer, losses)


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
    use = plan.arena
    assert use is not None
    step = plan.train_step(model, family.loss, optimizer)
    losses = []
    peak_bytes = 0
    for number in range(STEPS):
        torch.manual_seed(number)
        with metered(CPU) as meter:
            losses.append(step(*call.args, **call.kwargs))
        peak_bytes = meter.peak_bytes
    equal = digest(model, optimizer, losses) == expected
    bare = Program(plan.program.instructions)
    without = replace(plan, program=bare).train_step(model, family.loss, optimizer)
    ways = {
        "with": lambda: step(*call.args, **call.kwargs),
        "without": lambda: without(*call.args, **call.kwargs),
    }
    times = interleaved(model, ways, given.rounds, CPU)
    sizes = (use.arena_bytes, plan.peak_bytes - plan.resident_bytes, peak_bytes)
    _, planned, _ = sizes
    liveness = replay(plan.graph, bare).peak_bytes - plan.resident_bytes
    line = (
        f"{name}{'*' * at_any_cost} | {kind} | {use.coverage:.1%} | "
        f"{' | '.join(map(mib, sizes))} | {peak_bytes / planned:.4f} | "
        f"{mib(liveness)} | {planned / liveness - 1:.1%} | {'yes' if equal else 'NO'} | "
        f"{statistics.median(times['with']):.3f} | {ratio(times, 'with', 'without'):.3f} | "
        f"{outside(plan)}"
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
    assert use is not None
    total = use.covered_bytes + use.outside_bytes
    return ", ".join(
        f"{kernel.target.removeprefix('aten.').removesuffix('.default')} "
        f"{kernel.bytes_written / total:.1%}"
        for kernel in use.outside
        if kernel.bytes_written >= 0.001 * total
    )


BENCHMARK = Benchmark(
    cases={f"{name} {kind}": (name, kind) for name in FAMILIES for kind in OPTIMIZERS},
    measure=measured,
    head="model | optimizer | coverage | arena | planned | measured | / planned | liveness | "
    "planned above it | equal | step s | time | outside the arena, of the bytes written",
    options={"size": OneOf(("tiny", "paper")), "batch": 4, "rounds": 9},
)

"""Whole steps run at planned addresses: equality, coverage, peak and time.

    python -m benchmarks.arena [--size tiny|paper] [--batch N] [--rounds N] [--out FILE]
                               [--note TEXT] [--resume FILE] [--fresh] [family ...]

Every family trains three steps under OLLA's plan with SGD-momentum and with AdamW, and must end
with eager's loss, parameters, buffers and optimizer state, bit for bit. Time: the same program
with and without its addresses, in turn.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.kept import Kept
from benchmarks.steps import interleaved, ratio
from memopt.api.plan import Plan
from memopt.profiler.inputs import Call, to_call
from memopt.profiler.memory import metered
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.strategies.olla import Olla
from tests.zoo import Family, get

FAMILIES = ("resnet50", "vgg16", "mobilenet_v2", "gpt2", "bert", "llama", "vit_b_16")
OPTIMIZERS = ("momentum", "adamw")
STEPS = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One family under one optimizer. Bytes are beyond the resident ones."""

    model: str
    optimizer: str
    coverage: float
    arena_bytes: int
    planned_bytes: int
    measured_bytes: int
    without_bytes: int
    equal: bool
    time_ratio: float
    step_s: float
    outside: str
    at_any_cost: bool = False
    """Whether OLLA by itself would have left the addresses out."""


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
    """What three eager steps leave."""
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


def measured(family: Family, kind: str, options: argparse.Namespace) -> Row:
    """Plan, train, compare, and time one family."""
    inputs = family.inputs(options.size, batch=options.batch)
    call = to_call(inputs)
    expected = eager(family, kind, options.size, call)
    gc.collect()
    model = family.build(options.size)
    optimizer = optimizer_of(kind, model)
    plan, at_any_cost = placed_plan(family, model, optimizer, inputs)
    use = plan.arena
    assert use is not None
    assert plan.graph is not None
    assert plan.program is not None
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
    times = interleaved(
        model,
        {
            "with": lambda: step(*call.args, **call.kwargs),
            "without": lambda: without(*call.args, **call.kwargs),
        },
        options.rounds,
        CPU,
    )
    return Row(
        model=family.name,
        optimizer=kind,
        coverage=use.coverage,
        arena_bytes=use.arena_bytes,
        planned_bytes=plan.peak_bytes - plan.resident_bytes,
        measured_bytes=peak_bytes,
        without_bytes=replay(plan.graph, bare).peak_bytes - plan.resident_bytes,
        equal=equal,
        time_ratio=ratio(times, "with", "without"),
        step_s=statistics.median(times["with"]),
        outside=outside(plan),
        at_any_cost=at_any_cost,
    )


def placed_plan(
    family: Family, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any
) -> tuple[Plan, bool]:
    """OLLA's plan; where its addresses would cost too much, the one that has them all the same."""
    for strategy in (Olla(), Olla(arena_cost=None)):
        plan = memopt.plan(
            model,
            inputs,
            loss_fn=family.loss,
            optimizer=optimizer,
            strategy=strategy,
            progress=False,
        )
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


def page(rows: list[Row], settings: dict[str, Any]) -> list[str]:
    """The results as Markdown."""
    lines = [
        "# Steps at planned addresses" + (", full size" if settings["size"] == "paper" else ""),
        "",
        f"`python -m benchmarks.arena --size {settings['size']} --batch {settings['batch']} "
        f"--rounds {settings['rounds']}`, "
        f"{settings['threads']} thread(s), torch {settings['torch']}, OLLA's plans of whole steps. "
        "MiB beyond the resident bytes. *Planned* is the arena and the most that lies outside it; "
        "*liveness* the same program's peak without addresses; *time* the median over paired "
        f"steps ({settings['rounds']}) with and without them. *Equal*: loss, parameters, buffers "
        f"and optimizer state after {STEPS} steps are eager's, bit for bit.",
        "",
        "| model | optimizer | coverage | arena | planned | measured | / planned | liveness "
        "| planned above it | equal | step s | time |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        mib = [
            f"{size / 2**20:.1f}"
            for size in (row.arena_bytes, row.planned_bytes, row.measured_bytes)
        ]
        lines.append(
            f"| {row.model}{'*' * row.at_any_cost} | {row.optimizer} | {row.coverage:.1%} "
            f"| {' | '.join(mib)} | {row.measured_bytes / row.planned_bytes:.4f} "
            f"| {row.without_bytes / 2**20:.1f} "
            f"| {row.planned_bytes / row.without_bytes - 1:.1%} "
            f"| {'yes' if row.equal else 'NO'} | {row.step_s:.3f} | {row.time_ratio:.3f} |"
        )
    if any(row.at_any_cost for row in rows):
        lines += [
            "",
            "\\* Placed on request (`Olla(arena_cost=None)`): by itself OLLA leaves the addresses "
            "of this step out, which cost more than 2% of the peak.",
        ]
    lines += ["", "Outside the arena, by share of the bytes that kernels write:", ""]
    named = {row.model: row.outside for row in rows}
    lines += [f"- {model}: {text}" for model, text in named.items()]
    return lines


def main() -> int:
    """Measure the families asked for; 1 if one differs from eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena", description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="family")
    parser.add_argument("--size", choices=("tiny", "paper"), default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where to write the page")
    parser.add_argument("--note", default="", help="a sentence for the page, on the machine say")
    parser.add_argument("--resume", type=Path, default=Path("build/arena.json"))
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    settings = {
        "size": options.size,
        "batch": options.batch,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    names = options.families
    for name in kept.missing(names, lambda text: print(text, file=sys.stderr)):
        rows = []
        for kind in OPTIMIZERS:
            row = measured(get(name), kind, options)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
            gc.collect()
        kept.add(name, rows)
    rows = kept.ordered(names)
    lines = page(rows, settings)
    lines[4:4] = [options.note, ""] if options.note else []
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return int(not all(row.equal for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""MONeT's Figures 4 to 7 redone: which kinds of implementations help, on its five models.

Estimated for the paper's P100 at its batches. A plan of one kind is one of all kinds, too: that
search starts from the best of theirs, and so never ends with a slower one; theirs start from the
plan without kinds. With `--menu paper` convolutions have cuDNN's algorithms as data, and plans
that do not choose them get the fastest that fit afterwards, as in the paper. ResNet-50 at the
paper's share is drawn, operator by operator (figure 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.monet_algorithms import PlainConvolution, choices, convolutions, with_menu
from benchmarks.monet_runs import CASES, P100, Case, Runs, Started, eager_peak_bytes, over
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark, OneOf
from benchmarks.table import GIB, MIB, joined, mib, signed, table
from memopt.models.graph import Graph, Phase
from memopt.programs.instructions import Compute, LossBoundary, Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.monet.strategy import Choices
from memopt.strategies.shared.kernel_choice import fastest_kernels
from tests.zoo import get

SHARES = (0.35, 0.4, 0.47, 0.53, 0.6, 0.65)
"""Budgets over PyTorch's memory; the paper's figure 4 is at 0.53."""
DRAWN = ("resnet50", 0.53)
VARIANTS = (Choices.NONE, Choices.CONV, Choices.OUTPUT, Choices.INTERMEDIATE, Choices.ALL)
FIGURE_7 = PlainConvolution(256, 64, 64, 56 * 56, 3)
Layers = dict[str, list[float]]
"""By operator: memory while it runs for the first time, or what runs again before; bytes of its
results that are kept for the backward; seconds of what runs again before it."""


@dataclass(frozen=True)
class Row:
    """One model at one share; `drawn`: way → its curves."""

    text: str
    drawn: dict[str, Layers]


def layers(graph: Graph, program: Program) -> Layers:
    """Sum a program up by operator."""
    count = len(graph.operators)
    found: Layers = {name: [0.0] * count for name in ("memory", "kept", "again")}
    live: set[int] = set()
    begun: set[int] = set()
    before: list[tuple[float, float]] = []
    run = replay(graph, program)
    for step, size, start, end in zip(program, run.step_bytes, run.start_s, run.end_s, strict=True):
        effects = step.effects(graph)
        live = (live - set(effects.ends)) | set(effects.begins)
        if isinstance(step, LossBoundary):
            for i, operator in enumerate(graph.operators):
                kept = live.intersection(operator.writes)
                found["kept"][i] = sum(graph.tensors[t].size_bytes for t in kept)
        if not isinstance(step, Compute):
            continue
        first = step.op not in begun
        again = not first and graph.operators[step.op].phase is Phase.FORWARD
        before.append((size, end - start if again else 0.0))
        if first:
            begun.add(step.op)
            found["memory"][step.op] = max(size for size, _ in before)
            found["again"][step.op] = sum(time_s for _, time_s in before)
            before = []
    return found


def _graph(case: Case, menu: str) -> Graph:
    graph = case.graph()
    if menu == "memopt":
        return graph
    with torch.device("meta"):
        model, images = get(case.family).build("paper"), torch.empty(case.batch, 3, *case.pixels)
    return with_menu(graph, convolutions(model, images))


def _planned(given: Any, case: Case) -> list[Row]:
    graph = _graph(case, given.menu)
    runs = Runs(case.family, graph, given.limit, P100)
    rows = []
    for share in given.shares:
        budget = int(share * eager_peak_bytes(graph))
        programs: dict[Choices, Program] = {}
        found: dict[Choices, Program] = {}
        overheads: list[float | None] = []
        for choice in VARIANTS:
            # Others' fastest kernels are choices of a convolution, which only the last has, too.
            known = programs.values() if choice is Choices.ALL else found.values()
            names = VARIANTS if choice is Choices.ALL else (Choices.NONE,)
            first = tuple(one for one, name in zip(known, programs, strict=True) if name in names)
            strategy = Started(exact_only=False, choices=choice, known=first)
            program = runs.program(strategy, budget)
            if program is not None:
                found[choice] = program
                paper = given.menu != "memopt"
                programs[choice] = fastest_kernels(graph, program, budget) if paper else program
            time_s = None if program is None else replay(graph, programs[choice]).time_s
            overheads.append(over(time_s, runs.base_s))
        *alone, every = overheads
        least = min((one for one in alone if one is not None), default=None)
        best = least is None or (every is not None and every <= least + 1e-9)
        if given.menu == "paper":
            time_s = replay(graph, found[Choices.NONE]).time_s if Choices.NONE in found else None
            overheads.insert(0, over(time_s, runs.base_s))
        cells = " | ".join(signed(one, none="none") for one in overheads)
        shown: dict[str, Program] = {}
        if (case.family, share) == DRAWN:
            shown = {"PyTorch": store_all(graph)} | {
                f"MONeT, {choice}": programs[choice]
                for choice in (Choices.NONE, Choices.ALL)
                if choice in programs
            }
        text = f"{case.family} | {share:.2f} | {cells} | {'yes' if best else 'no'}"
        rows.append(Row(text, {name: layers(graph, p) for name, p in shown.items()}))
    return rows


def _blocks(rows: list[Row], given: Any) -> dict[str, str]:
    head = f"model | budget | {' | '.join(map(str, VARIANTS))} | all never worse"
    if given.menu == "memopt":
        return {"results": table(head, [row.text for row in rows])}
    head = head.replace("none", "none, default algorithms | none", 1)
    lines = table(head, [row.text for row in rows])
    shown = [(name, f"{time:.2f}", mib(size)) for name, time, size in choices(FIGURE_7)]
    return {"menu": joined(table("algorithm | time | workspace, MiB", shown), lines)}


def pictures(rows: list[Row], given: Any) -> None:
    """Draw figure 5 beside the page."""
    drawn = next((row.drawn for row in rows if row.drawn), None)
    if drawn is None:
        return
    own = drawn["PyTorch"]
    with panels(given.out.with_suffix(".png"), 3, size=(8, 2.3), dpi=70) as axes:
        for index, (name, found) in enumerate(drawn.items()):
            saved = [a - b for a, b in zip(own["kept"], found["kept"], strict=True)]
            curves = {
                "memory, GiB": [size / GIB for size in found["memory"]],
                "saved at the boundary, MiB": [size / MIB for size in saved],
                "run again before it, ms": [1e3 * time_s for time_s in found["again"]],
            }
            for one, (label, curve) in zip(axes, curves.items(), strict=True):
                if name != "PyTorch" or one is axes[0]:
                    one.plot(curve, label=name, color=f"C{index}", linewidth=0.9)
                one.set_ylabel(label)
        axes[-1].set_xlabel("operator")


BENCHMARK = Benchmark(
    row=Row,
    cases={case.family: (case,) for case in CASES},
    measure=_planned,
    blocks=_blocks,
    pictures=pictures,
    options={"limit": 20.0, "shares": SHARES, "menu": OneOf(("memopt", "paper"))},
)

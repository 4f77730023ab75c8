"""MONeT's Figures 4 to 7 redone: which kinds of implementations help, on its five models.

Estimated for the paper's P100 at its batches. A plan of one kind is one of all kinds, too: that
search starts from the best of theirs, and so never ends with a slower one; theirs start from the
plan without kinds. With `--menu paper` convolutions have cuDNN's algorithms as data, and plans
that do not choose them get the fastest that fit afterwards, as in the paper. ResNet-50 at the
paper's share is drawn, operator by operator (figure 5).

cuDNN's seven algorithms of a convolution (appendix G, figure 7) are data, for estimates: the paper
draws their times and workspaces without numbers. Here workspaces follow from what each algorithm
keeps: columns, transformed tiles, or spectra. Times, over that of the default, stand for the
multiplications that it saves (Lavin, Gray: Fast Algorithms for Convolutional Neural Networks, 2016;
Mathieu, Henaff, LeCun: Fast Training of Convolutional Networks through FFTs, 2014), about half of
which its transforms cost. They are assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.monet_runs import CASES, P100, Case, Runs, Started, eager_peak_bytes, over
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark, OneOf, crossed
from benchmarks.table import GIB, MIB, joined, mib, signed, table
from memopt.models.graph import Graph, Implementation, Operator, Phase
from memopt.programs.instructions import Compute, LossBoundary, Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.monet.strategy import Choices
from memopt.strategies.shared.kernel_choice import fastest_kernels
from tests.zoo import get


@dataclass(frozen=True)
class PlainConvolution:
    """A convolution of stride 1 and one group: elements of its input, weight and result."""

    images: int
    channels: int
    results: int
    pixels: int
    window: int

    @property
    def elements(self) -> tuple[int, int, int]:
        per_image = self.images * self.pixels
        weight = self.channels * self.results * self.window**2
        return per_image * self.channels, weight, per_image * self.results


def _spectra(c: PlainConvolution) -> float:
    # Half of the frequencies of real numbers, each complex.
    x, _, y = c.elements
    return x + y + c.channels * c.results * c.pixels


def _tiles(c: PlainConvolution) -> float:
    x, _, y = c.elements
    return (x + y) * (32 / (33 - c.window)) ** 2 + c.channels * c.results * 32 * 17 * 2


def _winograd(c: PlainConvolution) -> float:
    x, weight, y = c.elements
    tile = (4 + c.window - 1) ** 2
    return (x + y) * tile / 16 + weight * tile / c.window**2


DEFAULT = "precomputed gemm"
MENU: dict[str, tuple[dict[int, float], Callable[[PlainConvolution], float]]] = {
    "implicit gemm": ({1: 1.4, 3: 1.4, 5: 1.4}, lambda _: 0),
    DEFAULT: ({1: 1.0, 3: 1.0, 5: 1.0}, lambda _: 0),
    "gemm": ({3: 0.95, 5: 0.95}, lambda c: c.elements[0] * c.window**2),
    "winograd": ({3: 0.7}, lambda c: c.elements[1] * 16 / 9),
    "winograd, not fused": ({3: 0.55, 5: 0.6}, _winograd),
    "fft": ({3: 0.9, 5: 0.5}, _spectra),
    "fft, tiled": ({3: 0.8, 5: 0.55}, _tiles),
}
"""Algorithm → its time over the default's by the window's width, and its workspace in elements."""


def choices(c: PlainConvolution) -> Iterator[tuple[str, float, int]]:
    """Yield (algorithm, time over the default's, workspace in bytes of float32) of those that
    apply."""
    for name, (times, elements) in MENU.items():
        if c.window in times:
            yield name, times[c.window], int(4 * elements(c))


def convolutions(model: nn.Module, images: torch.Tensor) -> dict[str, PlainConvolution]:
    """Find the convolutions that the menu is for, by the names of their modules; on meta."""
    found: dict[str, PlainConvolution] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: Any, inputs: Any, y: torch.Tensor) -> None:
            x = inputs[0]
            if layer.stride == (1, 1) and layer.groups == 1 and x.shape[2:] == y.shape[2:]:
                pixels, window = y.shape[2] * y.shape[3], layer.kernel_size[0]
                found[name] = PlainConvolution(len(x), x.shape[1], y.shape[1], pixels, window)

        return hook

    for name, layer in model.named_modules():
        if type(layer) is nn.Conv2d and len(set(layer.kernel_size)) == 1:
            layer.register_forward_hook(note(name))
    model(images)
    return found


def with_menu(graph: Graph, known: dict[str, PlainConvolution]) -> Graph:
    """Give convolutions the algorithms that none beats in both time and workspace, forward and for
    each gradient; they count as exact, as in the paper."""
    return replace(graph, operators=[_with(x, known.get(x.module)) for x in graph.operators])


def _with(operator: Operator, shape: PlainConvolution | None) -> Operator:
    if shape is None or "convolution" not in operator.target:
        return operator
    found, least = list(choices(shape)), 1.0
    useful = []
    for name, time, size in sorted(found, key=lambda one: (one[2], one[1])):
        if time < least:
            useful.append((name, time, size))
            least = time
    own = Implementation("", operator.time_s)
    bases = [own, *(x for x in operator.implementations if x.name.endswith("t gradient"))]
    more = [
        replace(
            base,
            name=f"{base.name} {name}".strip(),
            time_s=base.time_s * time,
            workspace_bytes=size,
        )
        for base in bases
        for name, time, size in useful
    ]
    return replace(operator, implementations=(*operator.implementations, *more))


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
        model, images = get(case.name).build("paper"), torch.empty(case.batch, 3, *case.pixels)
    return with_menu(graph, convolutions(model, images))


def _planned(given: Any, case: Case, share: float) -> list[Row]:
    graph, paper = _graph(case, given.menu), given.menu == "paper"
    runs = Runs(case.name, graph, given.limit, P100)
    budget = int(share * eager_peak_bytes(graph))
    programs: dict[Choices, Program] = {}
    found: dict[Choices, Program] = {}
    overheads: dict[Choices, float | None] = dict.fromkeys(VARIANTS)
    for choice in VARIANTS:
        # Others' fastest kernels are choices of a convolution, which only the last has, too.
        starts = programs if choice is Choices.ALL else found
        names = VARIANTS if choice is Choices.ALL else (Choices.NONE,)
        known = tuple(starts[name] for name in names if name in starts)
        program = runs.program(Started(exact_only=False, choices=choice, known=known), budget)
        if program is not None:
            found[choice] = program
            programs[choice] = fastest_kernels(graph, program, budget) if paper else program
            overheads[choice] = over(replay(graph, programs[choice]).time_s, runs.base_s)
    every = overheads[Choices.ALL]
    alone = [one for choice, one in overheads.items() if choice is not Choices.ALL]
    least = min((one for one in alone if one is not None), default=None)
    best = least is None or (every is not None and every <= least + 1e-9)
    cells = [signed(one, none="none") for one in overheads.values()]
    if paper:
        own = found.get(Choices.NONE)
        time_s = None if own is None else replay(graph, own).time_s
        cells.insert(0, signed(over(time_s, runs.base_s), none="none"))
    shown: dict[str, Program] = {}
    if (case.name, share) == DRAWN:
        shown = {"PyTorch": store_all(graph)} | {
            f"MONeT, {choice}": programs[choice]
            for choice in (Choices.NONE, Choices.ALL)
            if choice in programs
        }
    text = f"{case.name} | {share:.2f} | {' | '.join(cells)} | {'yes' if best else 'no'}"
    return [Row(text, {name: layers(graph, p) for name, p in shown.items()})]


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
    cases=lambda given: crossed(CASES, given.shares),
    measure=_planned,
    blocks=_blocks,
    pictures=pictures,
    selects=("shares",),
    options={"limit": 20.0, "shares": SHARES, "menu": OneOf(("memopt", "paper"))},
)

"""What MONeT's benchmarks share: the paper's five cases, their graphs, plans kept on disk."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.kept import Kept
from memopt.api import planning
from memopt.errors import MemoptError
from memopt.implementations import with_implementations
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import computes, store_all, with_frees
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.reductions.linearize import Linearization, linearize
from memopt.strategies.base import CostModel, Solution, Status, Strategy
from memopt.strategies.monet.strategy import Monet
from tests.zoo import get

GIB = 2**30
DEVICE = "P100"
TOLERANCE = 0.01
"""Bisection for a memory stops at this share of the baseline's peak."""


@dataclass(frozen=True)
class Case:
    """One column of MONeT's Table 1.

    Attributes:
        family: its name in the zoo.
        batch, pixels: of the images; MONeT's repository (README, results) has the batches.
        pytorch_gib, checkmate_gib, monet_gib: the paper's Table 1, at 10% overhead.
        cpu_batch, cpu_pixels: at which it really runs here.
    """

    family: str
    batch: int
    pytorch_gib: float
    checkmate_gib: float
    monet_gib: float
    pixels: tuple[int, int] = (224, 224)
    cpu_batch: int = 8
    cpu_pixels: tuple[int, int] = (224, 224)

    @property
    def paper_share(self) -> float:
        """MONeT's memory over PyTorch's."""
        return self.monet_gib / self.pytorch_gib


CASES = (
    Case("resnet50", 184, 15.1, 8.2, 5.7),
    Case("googlenet", 320, 14.9, 10.5, 6.9, cpu_batch=16),
    Case("unet", 11, 14.3, 9.1, 5.2, (608, 416), cpu_batch=2, cpu_pixels=(304, 208)),
    Case("vgg16", 176, 14.1, 9.9, 5.5, cpu_batch=4),
    Case("mobilenet_v2", 272, 14.5, 5.8, 4.8, cpu_batch=16),
)


def case_of(name: str) -> Case:
    """The case of a family.

    Raises:
        KeyError: there is none.
    """
    found = {case.family: case for case in CASES}
    if name not in found:
        raise KeyError(f"no case {name!r}; there are {', '.join(found)}")
    return found[name]


def kept_graph(path: Path, make: Callable[[], Graph]) -> Graph:
    """A graph from its file, or made and kept there."""
    if path.exists():
        found = loads(path.read_bytes())
        if isinstance(found, Graph):
            return found
    graph = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dumps(graph))
    return graph


def estimated_graph(case: Case, folder: Path) -> Graph:
    """The step's graph with every implementation, priced for DEVICE; kept in `folder`."""

    def make() -> Graph:
        device = find_device(DEVICE)
        with torch.device("meta"):
            model = get(case.family).build("paper").train()
            images = torch.empty(case.batch, 3, *case.pixels)
        return with_implementations(estimate_model(model, images, device), device=device).graph

    return kept_graph(folder / f"{case.family}-b{case.batch}.json", make)


def eager_peak_bytes(graph: Graph) -> int:
    """Peak of the step as the paper's PyTorch ran it: the backward of an in-place ReLU6 read its
    output; today's reads a copy of its input, which the captured step has, too."""
    steps = []
    for step in computes(graph, range(len(graph.operators))):
        if isinstance(step, Compute):
            operator = graph.operators[step.op]
            names = [choice.name for choice in operator.implementations]
            if "hardtanh_backward" in operator.target and "output" in names:
                step = Compute(step.op, (), "output")
        steps.append(step)
    return replay(graph, Program(with_frees(graph, steps))).peak_bytes


def plain(graph: Graph) -> Graph:
    """The graph with default implementations only."""
    operators = [replace(operator, implementations=()) for operator in graph.operators]
    return replace(graph, operators=operators)


@dataclass(frozen=True)
class Started(Monet):
    """MONeT's search from programs of smaller sets of implementations, beside Rotor's: it ends
    with none slower.

    Attributes:
        known: those programs; what does not fit the budget is left out.
    """

    known: tuple[Program, ...] = field(default=(), repr=False)

    def incumbent(
        self, graph: Graph, budget_bytes: int | None
    ) -> tuple[Program | None, int | None]:
        best, smallest = super().incumbent(graph, budget_bytes)
        timelines = [(replay(graph, p), p) for p in (best, *self.known) if p is not None]
        fitting = [
            (timeline.time_s, program)
            for timeline, program in timelines
            if budget_bytes is None or timeline.peak_bytes <= budget_bytes
        ]
        return min(fitting, key=lambda one: one[0], default=(0.0, None))[1], smallest


@dataclass(frozen=True)
class Known(Strategy):
    """One program of a graph, to be made a plan again.

    Attributes:
        program: which.
    """

    program: Program = field(repr=False)

    name: ClassVar[str] = "known"
    needs: ClassVar[str] = "graph"

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **_: Any) -> Solution:
        """It, whatever the budget."""
        timeline = replay(self.taken(cost_model, Graph), self.program)
        return Solution(
            Status.FEASIBLE,
            program=self.program,
            peak_bytes=timeline.peak_bytes,
            time_s=timeline.time_s,
        )


def chosen_of(graph: Graph, program: Program | None) -> dict[str, int]:
    """How often a program runs which implementation, by "operator name"."""
    names = Counter(
        f"{graph.operators[step.op].target.split('.')[1]} {step.implementation}"
        for step in program or ()
        if isinstance(step, Compute) and step.implementation is not None
    )
    return dict(sorted(names.items()))


@dataclass(frozen=True)
class Record:
    """One plan, validated and replayed. Times in seconds; None where there is no plan."""

    budget_bytes: int
    status: str
    peak_bytes: int | None
    time_s: float | None
    bound_s: float | None
    planning_s: float
    chosen: str
    """Implementations, each with how often it runs."""

    @property
    def gap(self) -> float | None:
        """Over the proved bound."""
        if self.time_s is None or not self.bound_s:
            return None
        return self.time_s / self.bound_s - 1


class Runs:
    """Plans of one graph, kept on disk, so that a stopped benchmark goes on where it was."""

    def __init__(
        self, name: str, graph: Graph, folder: Path, time_limit_s: float, device: Device
    ) -> None:
        self.name, self.graph, self.device = name, graph, device
        self.time_limit_s = time_limit_s
        base = replay(graph, store_all(graph))
        self.base_s, self.base_bytes = base.time_s, base.peak_bytes
        self._plain = plain(graph)
        self._views: dict[int, Linearization] = {}
        mark = hashlib.sha256(dumps(graph)).hexdigest()[:12]
        path = folder / f"{name}-{mark}-{time_limit_s:g}s.json"
        self._kept = Kept(path, Record, {"graph": mark, "time_limit_s": time_limit_s})

    def solve(self, strategy: Strategy, budget_bytes: int) -> Record:
        """A strategy's plan within a budget; strategies without choices get the plain graph."""
        key = f"{strategy!r} {budget_bytes}"
        if key in self._kept.rows:
            return self._kept.rows[key][0]
        begin = time.perf_counter()
        record, program = self._solved(strategy, budget_bytes)
        record = replace(record, planning_s=time.perf_counter() - begin)
        if program is not None:
            self._kept.path.parent.mkdir(parents=True, exist_ok=True)
            self._program_path(key).write_bytes(dumps(program))
        self._kept.add(key, [record])
        sys.stderr.write(
            f"{self.name} {strategy.name} {budget_bytes / self.base_bytes:.3f}: "
            f"{self.overhead(record)}, {record.planning_s:.1f} s\n"
        )
        sys.stderr.flush()
        return record

    def program(self, strategy: Strategy, budget_bytes: int) -> Program | None:
        """The program of a strategy's plan within a budget; None where there is no plan."""
        if self.solve(strategy, budget_bytes).time_s is None:
            return None
        found = loads(self._program_path(f"{strategy!r} {budget_bytes}").read_bytes())
        assert isinstance(found, Program)
        return found

    def _program_path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:12]
        return self._kept.path.with_name(f"{self._kept.path.stem}-{name}.json")

    def _solved(self, strategy: Strategy, budget_bytes: int) -> tuple[Record, Program | None]:
        chooses = strategy.features.implementations
        graph = self.graph if chooses else self._plain
        view = None
        if strategy.needs == "chain":
            view = self._views.setdefault(0, linearize(graph))
        try:
            plan = planning.solve(
                graph,
                budget_bytes,
                strategy,
                device=self.device,
                time_limit_s=self.time_limit_s,
                view=view,
            )
        except MemoptError as error:
            return Record(budget_bytes, type(error).__name__, None, None, None, 0.0, ""), None
        record = Record(
            budget_bytes,
            str(plan.status),
            plan.peak_bytes,
            plan.step_time_s,
            plan.lower_bound_s,
            0.0,
            ", ".join(f"{n}× {name}" for name, n in chosen_of(graph, plan.program).items()),
        )
        return record, plan.program

    def overhead(self, record: Record) -> str:
        """Of a record's time over the baseline's, for people."""
        return "none" if record.time_s is None else f"{record.time_s / self.base_s - 1:+.1%}"

    def started(
        self, budget_bytes: int, *smaller: Strategy, less: tuple[Strategy, int] | None = None
    ) -> Started:
        """MONeT with every implementation, from the plans of `smaller` within the budget, and from
        that of `less`, a strategy and its smaller budget."""
        plans = [(strategy, budget_bytes) for strategy in smaller]
        programs = [self.program(*plan) for plan in ([*plans, less] if less else plans)]
        known = tuple(program for program in programs if program is not None)
        return Started(exact_only=False, known=known)

    def memory_at(
        self,
        strategy_at: Callable[[int], Strategy],
        overhead: float,
        known: Sequence[Record] = (),
    ) -> Record | None:
        """The record of least peak whose time is at most 1 + `overhead` of the baseline's, by
        bisection over the budget between the `known` records, which takes time to fall as the
        budget grows. `strategy_at` gives the strategy for a budget."""
        best: Record | None = None
        low, high = self.graph.resident_bytes, self.base_bytes
        for record in known:
            if self._within(record, overhead):
                high = min(high, record.budget_bytes)
                best = record if best is None or _peak(record) < _peak(best) else best
            else:
                low = max(low, record.budget_bytes)
        while high - low > TOLERANCE * self.base_bytes:
            middle = (low + high) // 2
            record = self.solve(strategy_at(middle), middle)
            if self._within(record, overhead):
                best = record if best is None or _peak(record) < _peak(best) else best
                high = middle
            else:
                low = middle
        return best

    def _within(self, record: Record, overhead: float) -> bool:
        return record.time_s is not None and record.time_s <= (1 + overhead) * self.base_s


def _peak(record: Record) -> int:
    assert record.peak_bytes is not None
    return record.peak_bytes

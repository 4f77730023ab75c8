"""What MONeT's benchmarks share: the paper's five cases, their graphs, plans made once."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from benchmarks.graphs import FOLDER
from benchmarks.table import captured, signed
from memopt.api import planning
from memopt.api.plan import Plan
from memopt.errors import MemoptError
from memopt.kernels import with_implementations
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import computes, store_all, with_frees
from memopt.programs.replay import replay
from memopt.reductions.linearize import linearize
from memopt.solvers.running import Deadline
from memopt.step.profiled import Profiled
from memopt.strategies.base import Strategy
from memopt.strategies.monet.strategy import Monet
from tests.zoo import get

P100 = find_device("P100")
OVERHEAD = 0.1
"""Of the paper's Table 1."""
TOLERANCE = 0.01
"""Bisection for a memory stops at this share of the baseline's peak."""


@dataclass(frozen=True)
class Case:
    """One column of MONeT's Table 1.

    Attributes:
        batch, pixels: of the images; MONeT's repository (README, results) has the batches.
        pytorch_gib, checkmate_gib, monet_gib: the paper's Table 1, at 10% overhead.
        cpu_batch, cpu_pixels: at which it really runs here.
    """

    name: str
    batch: int
    pytorch_gib: float
    checkmate_gib: float
    monet_gib: float
    pixels: tuple[int, int] = (224, 224)
    cpu_batch: int = 8
    cpu_pixels: tuple[int, int] = (224, 224)

    @property
    def paper_share(self) -> float:
        return self.monet_gib / self.pytorch_gib

    def graph(self) -> Graph:
        """Capture the step with every implementation, priced for the P100."""

        def make() -> Graph:
            with torch.device("meta"):
                model = get(self.name).build("paper").train()
                images = torch.empty(self.batch, 3, *self.pixels)
            return with_implementations(estimate_model(model, images, P100), device=P100).graph

        return captured(FOLDER / f"{P100.name}-{self.name}-b{self.batch}.json", Graph, make)


CASES = (
    Case("resnet50", 184, 15.1, 8.2, 5.7),
    Case("googlenet", 320, 14.9, 10.5, 6.9, cpu_batch=16),
    Case("unet", 11, 14.3, 9.1, 5.2, (608, 416), cpu_batch=2, cpu_pixels=(304, 208)),
    Case("vgg16", 176, 14.1, 9.9, 5.5, cpu_batch=4),
    Case("mobilenet_v2", 272, 14.5, 5.8, 4.8, cpu_batch=16),
)


def eager_peak_bytes(graph: Graph) -> int:
    """Give the peak of the step as the paper's PyTorch ran it: the backward of an in-place ReLU6
    read its output; today's reads a copy of its input, which the captured step has, too."""
    steps = []
    for step in computes(graph, range(len(graph.operators))):
        if isinstance(step, Compute):
            operator = graph.operators[step.op]
            names = [choice.name for choice in operator.implementations]
            if "hardtanh_backward" in operator.target and "output" in names:
                step = Compute(step.op, (), "output")
        steps.append(step)
    return replay(graph, Program(with_frees(graph, steps))).peak_bytes


@dataclass(frozen=True)
class Started(Monet):
    """MONeT's search from the `known` programs of smaller sets of implementations that fit the
    budget, beside Rotor's: it ends with none slower."""

    known: tuple[Program, ...] = field(default=(), repr=False)

    def incumbent(
        self, graph: Graph, budget_bytes: int | None, deadline: Deadline
    ) -> tuple[Program | None, Program]:
        best, smallest = super().incumbent(graph, budget_bytes, deadline)
        timelines = [(replay(graph, p), p) for p in (best, *self.known) if p is not None]
        fitting = [
            (timeline.time_s, program)
            for timeline, program in timelines
            if budget_bytes is None or timeline.peak_bytes <= budget_bytes
        ]
        return min(fitting, key=lambda one: one[0], default=(0.0, None))[1], smallest


def chosen_of(graph: Graph, program: Program | None) -> dict[str, int]:
    """Count how often a program runs which implementation, by "operator name"."""
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
        return over(self.time_s, self.bound_s) if self.bound_s else None


def over(time_s: float | None, base_s: float) -> float | None:
    """Give a time's overhead; None where there is no time."""
    return None if time_s is None else time_s / base_s - 1


class Runs:
    """Plans of one graph, each made once."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        time_limit_s: float,
        device: Device,
        profiled: Profiled | None = None,
    ) -> None:
        self.name, self.graph = name, graph
        self._how = {"time_limit_s": time_limit_s, "device": device, "profiled": profiled}
        base = replay(graph, store_all(graph))
        self.base_s, self.base_bytes = base.time_s, base.peak_bytes
        operators = [replace(operator, implementations=()) for operator in graph.operators]
        self._plain = replace(graph, operators=operators)
        self._view = cache(lambda: linearize(self._plain))
        self._made: dict[tuple[str, int], tuple[Record, Plan | None]] = {}

    def solve(self, strategy: Strategy, budget_bytes: int) -> Record:
        """Plan within a budget; strategies without choices get the plain graph."""
        key = repr(strategy), budget_bytes
        if key not in self._made:
            self._made[key] = record, _ = self._solved(strategy, budget_bytes)
            share = f"{budget_bytes / self.base_bytes:.3f}"
            took = f"{self.overhead(record)}, {record.planning_s:.1f} s"
            print(f"{self.name} {strategy.name} {share}: {took}", file=sys.stderr, flush=True)
        return self._made[key][0]

    def plan(self, strategy: Strategy, budget_bytes: int) -> Plan | None:
        """Give a strategy's plan within a budget; None where there is none."""
        self.solve(strategy, budget_bytes)
        return self._made[repr(strategy), budget_bytes][1]

    def program(self, strategy: Strategy, budget_bytes: int) -> Program | None:
        """Give the program of that plan."""
        plan = self.plan(strategy, budget_bytes)
        return None if plan is None else plan.program

    def _solved(self, strategy: Strategy, budget_bytes: int) -> tuple[Record, Plan | None]:
        graph, how = self.graph, self._how
        if not strategy.features.implementations:
            graph = self._plain
        if strategy.needs == "chain":
            how = {**how, "view": self._view() if graph is self._plain else linearize(graph)}
        begin = time.perf_counter()
        try:
            plan = planning.solve(graph, budget_bytes, strategy, **how)
        except MemoptError as error:
            spent_s = time.perf_counter() - begin
            return Record(budget_bytes, type(error).__name__, None, None, None, spent_s, ""), None
        spent_s = time.perf_counter() - begin
        chosen = ", ".join(f"{n}× {name}" for name, n in chosen_of(graph, plan.program).items())
        figures = (plan.peak_bytes, plan.step_time_s, plan.lower_bound_s)
        return Record(budget_bytes, str(plan.status), *figures, spent_s, chosen), plan

    def overhead(self, record: Record) -> str:
        return signed(over(record.time_s, self.base_s), none="none")

    def started(
        self, budget_bytes: int, *smaller: Strategy, less: tuple[Strategy, int] | None = None
    ) -> Started:
        """Make MONeT with every implementation, from the plans of `smaller` within the budget, and
        from that of `less`, a strategy and its smaller budget."""
        plans = [*((strategy, budget_bytes) for strategy in smaller), *([less] if less else [])]
        known = (self.program(*plan) for plan in plans)
        return Started(exact_only=False, known=tuple(filter(None, known)))

    def memory_at(self, strategy: Strategy, overhead: float) -> Record | None:
        """Find the record of least peak whose time is at most 1 + `overhead` of the baseline's, by
        bisection over the budget, which takes time to fall as the budget grows."""
        best: Record | None = None
        low, high = self.graph.resident_bytes, self.base_bytes
        while high - low > TOLERANCE * self.base_bytes:
            middle = (low + high) // 2
            record = self.solve(strategy, middle)
            if record.time_s is not None and record.time_s <= (1 + overhead) * self.base_s:
                best = min((record, best or record), key=lambda one: one.peak_bytes or 0)
                high = middle
            else:
                low = middle
        return best

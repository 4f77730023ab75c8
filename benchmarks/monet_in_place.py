"""In-place operators as decisions of MONeT's program (appendix C.1, eq. 15-16) beside the pass.

The pass (`memopt.programs.in_place`) computes in place whatever a finished program lets it. Here
the program decides, so that its memory rows know of it. Both programs solve the same steps,
coarsened, within the same budgets from the same start; then the pass runs over both plans.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.graphs import step_graph
from benchmarks.runner import Benchmark
from benchmarks.table import joined, mib, table
from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant
from memopt.programs.in_place import with_in_place
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.coarsen import coarsen
from memopt.solvers.binary_program import Term
from memopt.solvers.running import Deadline, SolverOptions
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.shared.chain_programs import rotor_programs
from memopt.strategies.shared.time_point_search import TimePointSearch

OPERATORS = 48
SHARES = (0.9, 0.8, 0.7)
"""Budgets, of the step's peak with everything kept."""


class InPlaceModel(MonetModel):
    """MONeT's program with a variable q for every run that may overwrite an operand.

    q takes the operand's bytes out of the run's row of memory. Where q is 1 nothing may need the
    operand later: no run of the stage, not the stage's own operator, and no later stage (these are
    what the paper's p = r - 2q and s ≤ 2 - 2q say). The operands that a backward operator may
    overwrite are gradients, too; of these the last reader needs no decision.
    """

    def taken(
        self,
        choice: Operator | Variant,
        readers: Iterable[list[int]],
        held: dict[int, int],
        dying: Iterable[int] = (),
    ) -> list[Term]:
        """Return the terms of a run's memory row for what it overwrites.

        Args:
            choice: the run's implementation.
            readers: variables of the runs that follow in the stage and read its operands.
            held: for each forward tensor the variable that says whether it is needed afterwards.
            dying: gradients that nothing reads afterwards.
        """
        gone = [t for t in choice.in_place if t in set(dying)]
        found: list[Term] = []
        for t in choice.in_place:
            if t in self.graph.kept or (t not in gone and t not in held):
                continue
            q = self.model.variable()
            found.append((-self.size[t], q))
            if t in held:
                for row in (*readers, [held[t]]):
                    self.model.at_most_one([q, *row])
        self.model.at_most_one([q for _, q in found])
        return found

    def _reads_any(self, j: int, tensors: Iterable[int]) -> bool:
        """Tell whether operator j may read one of the tensors."""
        return any(not set(tensors).isdisjoint(choice.reads) for _, choice in self.choices[j])

    def _forward_pass(self) -> None:
        model, graph = self.model, self.graph
        last = self._last_reader(self.forward)
        writers: dict[int, list[int]] = defaultdict(list)
        for i in self.forward:
            model.exactly_one(self.d[i])
            held_bytes = self.bytes_of(t for t in writers if last.get(t, -1) >= i)
            saved = self.terms((t, self.s[0][t]) for t in writers if last.get(t, -1) < i)
            ending = {t: self.s[0][t] for t in writers if last.get(t) == i}
            for (_, choice), chosen in zip(self.choices[i], self.d[i], strict=True):
                own = self.bytes_of(choice.writes) + choice.workspace_bytes
                over = self.taken(choice, (), ending)
                model.memory(held_bytes + own, [*saved, *over], chosen)
                for t in choice.reads:
                    if t not in graph.resident:
                        model.implies_any(chosen, writers[t])
            self._add_writers(writers, i, self.d[i])
        for t in self.made:
            model.implies_any(self.s[0][t], writers[t])
        if self.has_boundary:
            self.boundary_row(self.s[0].items())

    def _stage(self, k: int) -> None:
        model, now, after = self.model, self.s[k], self.s[k + 1]
        found = self._gradients(k)
        dying = set(found) - set(self._gradients(k + 1))
        gradient_bytes = self.bytes_of(found)
        index = self.backward[k]
        chosen = self.run_variables(index)
        self.b.append(chosen)
        if k and self.backward[k - 1] == index:
            model.at_most_one(chosen)
        else:
            model.exactly_one(chosen)
        again = {i: self.run_variables(i) for i in sorted(self.useful[k])}
        self.r.append(again)
        writers: dict[int, list[int]] = defaultdict(list)
        for i, variables in again.items():
            model.at_most_one(variables)
            self._add_writers(writers, i, variables)
        used = {t: model.variable() for t in self.made}
        for t, u in used.items():
            model.implies_any(after[t], [u])
            model.implies_any(after[t], [now[t], *writers[t]])
        for (_, choice), v in zip(self.choices[index], chosen, strict=True):
            for t in choice.reads:
                if t in self.made:
                    model.implies_any(v, [now[t], *writers[t]])
                    model.implies_any(v, [used[t]])
            own = self.bytes_of(t for t in choice.writes if t not in found)
            own += choice.workspace_bytes
            # A split operator's second stage may read the gradient again.
            free = dying if self.backward.count(index) == 1 else set()
            over = self.taken(choice, (), after, free)
            model.memory(gradient_bytes + own, [*self.terms(used.items()), *over], v)
            self._reads_gradients(k, v, choice)
        last = self._last_reader(again)
        for i, variables in again.items():
            local = {t for t, j in self.maker.items() if j < i and last.get(t, -1) >= i}
            constant = gradient_bytes + self.bytes_of(local)
            terms = self.terms(
                (t, used[t] if j < i else now[t])
                for t, j in self.maker.items()
                if j != i and t not in local
            )
            own_tensors = [t for t, j in self.maker.items() if j == i]
            for (_, choice), v in zip(self.choices[i], variables, strict=True):
                own = self.bytes_of(choice.writes) + choice.workspace_bytes
                rest = self.terms((t, now[t]) for t in own_tensors if t not in choice.writes)
                own += self.bytes_of(t for t in choice.writes if t in self.graph.kept)
                later = [
                    run
                    for j, run in again.items()
                    if j > i
                    and any(set(choice.in_place) & set(c.reads) for _, c in self.choices[j])
                ]
                over = self.taken(choice, later, {t: used[t] for t in local})
                model.memory(constant + own, [*terms, *rest, *over], v)
                for t in choice.reads:
                    if t in self.made:
                        model.implies_any(v, [now[t], *writers[t]])


@dataclass(frozen=True)
class Row:
    """One step within one budget, or its smallest peaks (share 0).

    Attributes:
        baseline_bytes: with everything kept and computed in place where possible.
        start_s: the plan to start from; infinite: there was none. `bound_s`: no plan is faster.
        plain, decided: (seconds of the step, its peak, CPU seconds) of the program's plan without
            and with the decision, after the pass; infinite: no plan within the budget.
    """

    name: str
    operators: int
    in_place: int
    share: float
    baseline_bytes: int
    start_s: float
    bound_s: float
    plain: list[float]
    decided: list[float]


def _solved(
    fine: Graph, size: int, budget_bytes: int | None, kind: type[MonetModel], effort: float
) -> list[float]:
    """Give the time and the peak of the program's plan, after the pass, and the CPU seconds."""
    coarse = coarsen(fine, size)
    began = time.process_time()
    built = kind(coarse.graph)
    if budget_bytes is not None:
        start = rotor_programs(coarse.graph, budget_bytes)[0]
        if start is not None:
            built.hint(start)
    limit = None if budget_bytes is None else budget_bytes - coarse.graph.resident_bytes
    answer = built.model.solve(limit, SolverOptions(deterministic_s=effort))
    cpu_s = time.process_time() - began
    if not answer.values:
        return [float("inf"), float("inf"), cpu_s]
    timeline = replay(fine, with_in_place(fine, coarse.expand(built.program(answer.values))))
    if budget_bytes is not None and timeline.peak_bytes > budget_bytes:
        raise AssertionError(f"a plan of {timeline.peak_bytes} bytes within {budget_bytes}")
    return [timeline.time_s, timeline.peak_bytes, cpu_s]


def _measured(given: Any, name: str, share: float) -> list[Row]:
    whole = step_graph(name)
    plain_operators = [replace(operator, implementations=()) for operator in whole.operators]
    graph = replace(whole, operators=plain_operators)
    keep = replay(graph, with_in_place(graph, store_all(graph)))
    budget = int(share * keep.peak_bytes) if share else None
    start_s, bound_s = float("inf"), 0.0
    if budget is not None:
        start = rotor_programs(graph, budget)[0]
        start_s = (
            replay(graph, with_in_place(graph, start)).time_s if start is not None else start_s
        )
        until = Deadline(time.monotonic() + given.seconds)
        bound_s = TimePointSearch(graph, None, budget, until).run().bound_s
    plain, decided = (
        _solved(graph, OPERATORS, budget, kind, given.effort) for kind in (MonetModel, InPlaceModel)
    )
    coarse = coarsen(graph, OPERATORS).graph.operators
    count = sum(bool(operator.in_place) for operator in coarse)
    figures = (keep.peak_bytes, start_s, bound_s)
    return [Row(name, len(coarse), count, share, *figures, plain, decided)]


def _cell(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < float("inf") else "none"


def _line(row: Row) -> list[object]:
    plain, decided = row.plain, row.decided
    gain = ""
    if max(plain[0], decided[0]) < float("inf"):
        which = 0 if row.share else 1
        gain = f"{100 * (1 - decided[which] / plain[which]):.3f}%"
    cells = [_cell(x) for x in (row.start_s, row.bound_s, plain[0], decided[0])]
    peaks = [mib(int(x[1])) if x[1] < float("inf") else "none" for x in (plain, decided)]
    times = [f"{x[2]:.1f}" for x in (plain, decided)]
    share = f"{row.share:g}" if row.share else "smallest peak"
    return [row.name, row.operators, row.in_place, share, *cells, *peaks, gain, *times]


def _blocks(rows: list[Row], _: Any) -> str:
    gains = [
        row.plain[0] - row.decided[0] for row in rows if row.share and row.plain[0] < float("inf")
    ]
    better = sum(gain > 1e-9 for gain in gains)
    return joined(
        f"With the decision {better} of {len(gains)} steps within a budget are faster, "
        f"{sum(gain < -1e-9 for gain in gains)} slower.",
        table(
            "step | operators | may be in place | budget, of the peak | start: ms | bound: ms | "
            "pass alone: ms | decided: ms | pass alone: MiB | decided: MiB | gain | "
            "CPU s: pass alone | decided",
            map(_line, rows),
        ),
    )


BENCHMARK = Benchmark(
    row=Row,
    cases={
        f"{name} {share:g}": (name, share)
        for share in (*SHARES, 0.0)
        for name in ("vgg16", "unet", "resnet50")
    },
    measure=_measured,
    blocks=_blocks,
    options={"effort": 1.0, "seconds": 2.0},
)

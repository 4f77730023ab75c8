"""Checkmate's 0-1 program (Jain et al., 2020) with exact lifetimes, and its two-phase rounding.

Stage t runs operator t for the first time, after any earlier operators that run again, in order.
The first backward stage has two such rounds, before and after the loss boundary, which the paper
does not have: there the tangents come into memory.

Variables: R[t,i]   operator i runs in stage t (i ≤ t)
    L[t,i,v] tensor v is in memory before operator i's turn in stage t; L[t,0,v] is Checkmate's
             S[t,v]. They take the place of its U, FREE and number-of-hazards variables.
Constraints: R[t,t] = 1 (frontier-advancing, eq. 8a); R[t,i] ≤ L[t,i,v] for what i reads (1b)
    L[t,i+1,v] ≤ L[t,i,v] + [i writes v] R[t,i] (1c); S[t+1] is L[t] after the last turn
    memory at a turn ≤ budget (eq. 2-4): Σ_v L[t,i,v] |v| + R[t,i] (written + workspace)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopt.models.graph import Phase, TensorKind
from memopt.programs.instructions import Compute, Instruction, Program
from memopt.programs.liveness import with_frees
from memopt.strategies.shared.graph_model import GraphModel, first_runs


@dataclass
class CheckmateModel(GraphModel):
    """Checkmate's program of a graph, default implementations only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.again: list[dict[int, int]] = []
        """R: variable by stage and operator."""
        self.before: list[dict[int, int]] = []
        """S: variable by stage and tensor."""
        self.early: dict[int, int] = {}
        """R of the first backward stage, before the loss boundary."""
        live: dict[int, int] = {}
        for t in range(self.count):
            live = self._stage(t, live)
        if self.first >= self.count and self.graph.tangents:
            self.boundary_row(live.items())

    def _useful(self, t: int) -> set[int]:
        """Find the operators that may run again in stage t: ancestors of the operators from t on
        that read no parameter which the step has updated by then."""
        found: set[int] = set()
        operators, producer = self.graph.operators, self.graph.producer
        stack = [v for j in range(t, len(operators)) for v in operators[j].reads]
        while stack:
            i = producer.get(stack.pop())
            if i is not None and i not in found:
                found.add(i)
                stack.extend(operators[i].reads)
        return {i for i in found if i < t and self._may_repeat(i, t)}

    def _may_repeat(self, i: int, t: int) -> bool:
        """Tell whether operator i may run again in stage t."""
        updated = {
            v
            for one in self.graph.operators[:t]
            if one.phase is Phase.UPDATE
            for v in one.reads
            if self.graph.tensors[v].kind is TensorKind.PARAMETER
        }
        operator = self.graph.operators[i]
        stale = operator.phase is not Phase.UPDATE and not updated.isdisjoint(operator.reads)
        return operator.recomputable and not stale

    def _stage(self, t: int, live: dict[int, int]) -> dict[int, int]:
        """Add the variables and rows of stage t; return the tensors live after it."""
        if t == self.first:
            for i in sorted(self._useful(t)):
                self.early[i], live = self._turn(i, live)
            self.boundary_row(live.items())
            live = dict(live)
            for v in self.graph.tangents:
                live[v] = self.model.variable()
                if v in self.graph.kept:
                    self.model.fixed[live[v]] = True
        self.before.append(live)
        again: dict[int, int] = {}
        for i in [*sorted(self._useful(t)), t]:
            again[i], live = self._turn(i, live)
        self.model.fixed[again[t]] = True
        self.again.append(again)
        return live

    def _turn(self, i: int, live: dict[int, int]) -> tuple[int, dict[int, int]]:
        """Add operator i's turn to run; return its variable, and the tensors live after it."""
        model, operator = self.model, self.graph.operators[i]
        run = model.variable(operator.time_s)
        for v in operator.reads:
            if v not in self.graph.resident:
                model.implies_any(run, [live[v]])
        own = self.bytes_of(operator.writes) + operator.workspace_bytes
        model.memory(0, [(own, run), *self.terms(live.items())])
        following: dict[int, int] = {}
        for v in dict.fromkeys((*live, *operator.writes)):
            following[v] = kept = model.variable()
            sources = [live[v]] if v in live else []
            model.implies_any(kept, [*sources, *([run] if v in operator.writes else [])])
            if v in self.graph.kept:
                model.fixed[kept] = True
        return run, following

    def hint(self, program: Program) -> None:
        """Start the solver from a program of the graph, as far as the class can express it."""
        for t, part in enumerate(first_runs(self.graph, program)):
            for v, x in self.before[t].items():
                self.model.hints[x] = v in part.live or v in self.graph.tangents
            for i, run in self.again[t].items():
                self.model.hints[run] = i in part.runs
        self.model.hints |= dict.fromkeys(self.early.values(), False)

    def program(self, values: tuple[bool, ...]) -> Program:
        """Read the program of a solution."""
        early = [i for i, run in self.early.items() if values[run]]
        stages = [[i for i, run in again.items() if values[run]] for again in self.again]
        return self._lowered(stages, early)

    def rounded(self, values: tuple[float, ...]) -> Program:
        """Round a relaxation in two phases (Checkmate §5): save S above a half, then run its
        needs."""
        operators, producer = self.graph.operators, self.graph.producer
        saved = [{v for v, x in stage.items() if values[x] > 0.5} for stage in self.before]
        have: set[int] = set()
        stages: list[list[int]] = []
        for t, stage in enumerate(saved):
            have = have & stage | set(self.graph.kept if t else ()) & have
            have |= set(self.graph.tangents) if t >= self.graph.first_backward else set()
            wanted = saved[t + 1] if t + 1 < len(saved) else set()
            run = {t}
            stack = [*operators[t].reads, *(v for v in wanted if producer.get(v, t) < t)]
            while stack:
                v = stack.pop()
                i = producer.get(v)
                if v in have or i is None or i in run:
                    continue
                if not self._may_repeat(i, t):
                    return self._lowered([[i] for i in range(len(operators))])
                run.add(i)
                stack.extend(operators[i].reads)
            stages.append(sorted(run))
            have |= {v for i in run for v in operators[i].writes}
        return self._lowered(stages)

    def _lowered(self, stages: list[list[int]], early: Sequence[int] = ()) -> Program:
        before = [i for stage in stages[: self.first] for i in stage] + list(early)
        after = [i for stage in stages[self.first :] for i in stage]
        runs: list[Instruction] = [Compute(i, ()) for i in before]
        runs += [*self.boundary(), *(Compute(i, ()) for i in after)]
        return Program(with_frees(self.graph, runs))

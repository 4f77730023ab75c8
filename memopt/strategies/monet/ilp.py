"""The exact MONeT program (MONeT eq. 4-9, appendices A, B and F) on a graph of one step.

A stage k is the k-th operator after the forward: forward operators that run again, in order,
then that operator. The paper's operators have one output each; here tensors are saved, so an
operator with several outputs, or an implementation with outputs of its own (a bit mask), needs
no extra node. A backward operator with implementations that each write some of its outputs only
(one gradient of a convolution) gets two stages, the second of which may stay idle.

Variables: d[i,l]   forward operator i uses implementation l in the forward (δ)
    r[k,i,l] it runs again in stage k with implementation l (δ^k; Σ_l is the paper's r_i^k)
    b[k,l]   operator k uses implementation l (δ̂)
    s[k,t]   tensor t is held from before stage k to its start (s^k)
    u[k,t]   t is held when operator k runs: max(s[k+1,t], t is read by its implementation).
             This takes the place of the products of appendix F, with the same values.
Indices are those of Algorithms 1-2 and eq. 1-3, not of eq. 7-8 as printed: see the docs page.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memopt.models.graph import Graph, Operator, Phase
from memopt.models.variants import Variant
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.strategies.monet.backend import Model
from memopt.strategies.monet.hints import stages
from memopt.strategies.monet.moments import Allowed, choices_of


@dataclass
class MonetModel:
    """The program of a graph; `model` is ready to solve, `program` reads an answer."""

    graph: Graph
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        graph = self.graph
        self.model = Model()
        self.size = [tensor.size_bytes for tensor in graph.tensors]
        self.forward = range(graph.first_backward)
        self.choices = [choices_of(operator, self.allowed) for operator in graph.operators]
        self.backward = [
            k
            for k in range(graph.first_backward, len(graph.operators))
            for _ in range(2 if self._split(k) else 1)
        ]
        """Stage → its operator."""
        self.made = {
            t: i for i in self.forward for _, choice in self.choices[i] for t in choice.writes
        }
        """Forward tensor → the operator that writes it, under any implementation."""
        self.useful = self._useful()
        self.d = [[self.model.variable(c.time_s) for _, c in self.choices[i]] for i in self.forward]
        self.s: list[dict[int, int]] = []
        self.r: list[dict[int, list[int]]] = []
        self.b: list[list[int]] = []
        for k in range(len(self.backward) + 1):
            self.s.append({t: self.model.variable() for t in self.made})
            for t in self.made:
                if t in graph.kept:
                    self.model.fixed[self.s[k][t]] = True
        self._forward_pass()
        for k in range(len(self.backward)):
            self._stage(k)
        self._results()

    def _results(self) -> None:
        """Gradients the step ends with are written; by two stages of an operator, once each."""
        written: dict[int, list[int]] = defaultdict(list)
        for k, index in enumerate(self.backward):
            for (_, choice), v in zip(self.choices[index], self.b[k], strict=True):
                for t in choice.writes:
                    written[t].append(v)
        for t, variables in written.items():
            if t in self.graph.kept:
                self.model.add([(-1, v) for v in variables], -1)
            if self._split(self.graph.producer.get(t, self.backward[0])):
                self.model.add([(1, v) for v in variables], 1)

    def _split(self, k: int) -> bool:
        """Whether a backward operator may run twice, some implementation leaving out some of its
        outputs."""
        operator = self.graph.operators[k]
        whole = set(operator.writes)
        partial = any(not whole <= set(choice.writes) for _, choice in self.choices[k])
        return partial and operator.recomputable

    def _useful(self) -> list[frozenset[int]]:
        """For each stage, the forward operators whose results it or a later one may need: no
        other is run again in it (the tighter bound of appendix A)."""
        useful: list[frozenset[int]] = []
        found: set[int] = set()
        for k in reversed(self.backward):
            stack = [t for _, choice in self.choices[k] for t in choice.reads]
            while stack:
                i = self.made.get(stack.pop())
                if i is not None and i not in found:
                    found.add(i)
                    stack.extend(t for _, choice in self.choices[i] for t in choice.reads)
            useful.append(
                frozenset(
                    i
                    for i in found
                    if self.graph.operators[i].recomputable
                    and self.graph.operators[i].phase is Phase.FORWARD
                )
            )
        return useful[::-1]

    def _last_reader(self, among: frozenset[int] | range) -> dict[int, int]:
        """Forward tensor → the last forward operator of `among` that may read it."""
        last: dict[int, int] = {}
        for j in sorted(among):
            for _, choice in self.choices[j]:
                for t in choice.reads:
                    last[t] = j
        return last

    def _forward_pass(self) -> None:
        """Eq. 1, the choice of one implementation each, and what may be saved."""
        model, graph = self.model, self.graph
        last = self._last_reader(self.forward)
        writers: dict[int, list[int]] = defaultdict(list)
        for i in self.forward:
            model.exactly_one(self.d[i])
            held = [t for t in writers if last.get(t, -1) >= i]
            saved = [(self.size[t], self.s[0][t]) for t in writers if last.get(t, -1) < i]
            constant = sum(self.size[t] for t in held)
            for (_, choice), chosen in zip(self.choices[i], self.d[i], strict=True):
                own = sum(self.size[t] for t in choice.writes) + choice.workspace_bytes
                model.memory(constant + own, saved, chosen)
                for t in choice.reads:
                    if t not in graph.resident:
                        model.implies_any(chosen, writers[t])
            for (_, choice), chosen in zip(self.choices[i], self.d[i], strict=True):
                for t in choice.writes:
                    writers[t].append(chosen)
        for t in self.made:
            model.implies_any(self.s[0][t], writers[t])
        if not self.backward and not graph.tangents:
            return
        at_boundary = sum(self.size[t] for t in graph.tangents) + graph.boundary_bytes
        model.memory(at_boundary, [(self.size[t], v) for t, v in self.s[0].items()])

    def _gradients(self, k: int) -> list[int]:
        """L̂_k: tensors of the backward (and tangents) that stage k finds and must keep."""
        later = {
            t for j in self.backward[k:] for _, choice in self.choices[j] for t in choice.reads
        } | self.graph.kept
        before = self.backward[:k]
        written = {t for j in before for _, choice in self.choices[j] for t in choice.writes}
        return sorted((written | set(self.graph.tangents)) & later)

    def _stage(self, k: int) -> None:
        """Eq. 5-8 and 12 of one stage."""
        model, now, after = self.model, self.s[k], self.s[k + 1]
        found = self._gradients(k)
        gradients = sum(self.size[t] for t in found)
        index = self.backward[k]
        chosen = [model.variable(choice.time_s) for _, choice in self.choices[index]]
        self.b.append(chosen)
        if k and self.backward[k - 1] == index:
            model.add([(1, v) for v in chosen], 1)
        else:
            model.exactly_one(chosen)
        again = {
            i: [model.variable(choice.time_s) for _, choice in self.choices[i]]
            for i in sorted(self.useful[k])
        }
        self.r.append(again)
        writers: dict[int, list[int]] = defaultdict(list)
        for i, variables in again.items():
            model.add([(1, v) for v in variables], 1)
            for (_, choice), v in zip(self.choices[i], variables, strict=True):
                for t in choice.writes:
                    writers[t].append(v)
        used = {t: model.variable() for t in self.made}
        for t, u in used.items():
            model.implies_any(after[t], [u])
            model.implies_any(after[t], [now[t], *writers[t]])  # eq. 7, second part
        for (_, choice), v in zip(self.choices[index], chosen, strict=True):
            for t in choice.reads:
                if t in self.made:
                    model.implies_any(v, [now[t], *writers[t]])  # eq. 8
                    model.implies_any(v, [used[t]])
            own = sum(self.size[t] for t in choice.writes if t not in found)
            own += choice.workspace_bytes
            model.memory(gradients + own, [(self.size[t], u) for t, u in used.items()], v)  # eq. 5
            self._reads_gradients(k, v, choice)
        last = self._last_reader(frozenset(again))
        for i, variables in again.items():
            local = {t for t, j in self.made.items() if j < i and last.get(t, -1) >= i}
            constant = gradients + sum(self.size[t] for t in local)
            terms = [
                (self.size[t], used[t] if j < i else now[t])
                for t, j in self.made.items()
                if j != i and t not in local
            ]
            for (_, choice), v in zip(self.choices[i], variables, strict=True):
                own = sum(self.size[t] for t in choice.writes) + choice.workspace_bytes
                # A tensor of i that this implementation does not write may be saved already.
                rest = [
                    (self.size[t], now[t])
                    for t, j in self.made.items()
                    if j == i and t not in choice.writes
                ]
                kept = sum(
                    self.size[t] for t in choice.writes if t in self.graph.kept
                )  # the first copy stays beside the one written again
                model.memory(constant + own + kept, terms + rest, v)  # eq. 12
                for t in choice.reads:
                    if t in self.made:
                        model.implies_any(v, [now[t], *writers[t]])  # eq. 7, first part

    def _reads_gradients(self, k: int, chosen: int, choice: Operator | Variant) -> None:
        """An operator's gradients must have been written by the implementations chosen before."""
        for t in choice.reads:
            if t in self.made or t in self.graph.resident or t in self.graph.tangents:
                continue
            model_writers = [
                v
                for j in range(k)
                for (_, other), v in zip(self.choices[self.backward[j]], self.b[j], strict=True)
                if t in other.writes
            ]
            self.model.implies_any(chosen, model_writers)

    def hint(self, program: Program) -> None:
        """Start the solver from a program of the graph, as far as the class can express it."""
        found = list(stages(self.graph, program))
        for stage in found[: len(self.forward)]:
            for i, name in stage.runs.items():
                if i in self.forward:
                    self._hint_choice(i, name, self.d[i])
        first = [k for k, i in enumerate(self.backward) if k == 0 or self.backward[k - 1] != i]
        for k, stage in zip(first, found[len(self.forward) :], strict=False):
            for t, v in self.s[k].items():
                self.model.hints[v] = t in stage.live
            for i, variables in self.r[k].items():
                self._hint_choice(i, stage.runs.get(i), variables, i in stage.runs)
            index = self.backward[k]
            self._hint_choice(index, stage.runs.get(index), self.b[k])

    def _hint_choice(
        self, i: int, name: str | None, variables: list[int], runs: bool = True
    ) -> None:
        for (other, _), v in zip(self.choices[i], variables, strict=True):
            self.model.hints[v] = runs and other == name

    def program(self, values: tuple[bool, ...]) -> Program:
        """The program of a solution; its replayed peak is at most the model's."""
        instructions: list[Instruction] = []

        def run(i: int, variables: list[int]) -> None:
            for (name, _), v in zip(self.choices[i], variables, strict=True):
                if values[v]:
                    instructions.append(Compute(i, (), name))

        for i in self.forward:
            run(i, self.d[i])
        if self.graph.tangents or self.backward:
            instructions.append(LossBoundary())
        for k, index in enumerate(self.backward):
            for i, variables in self.r[k].items():
                run(i, variables)
            run(index, self.b[k])
        return Program(with_frees(self.graph, instructions))

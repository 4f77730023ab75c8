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
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.graph import Operator, Phase
from memopt.models.variants import Variant
from memopt.programs.instructions import Program
from memopt.programs.liveness import with_frees
from memopt.strategies.shared.graph_model import GraphModel, first_runs


@dataclass
class MonetModel(GraphModel):
    """MONeT's program of a graph; `program` reads an answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        graph = self.graph
        self.forward = range(self.first)
        self.backward = [
            k for k in range(self.first, self.count) for _ in range(2 if self._split(k) else 1)
        ]
        """Operator of each stage."""
        self.maker = {t: writers[-1][0] for t, writers in self.made.items()}
        """The operator that writes each forward tensor, under any implementation."""
        self.useful = self._useful()
        self.d = [self.run_variables(i) for i in self.forward]
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
        """Require that the step's gradients are written, and by one of two stages only."""
        written: dict[int, list[int]] = defaultdict(list)
        for k, index in enumerate(self.backward):
            self._add_writers(written, index, self.b[k])
        for t, variables in written.items():
            if t in self.graph.kept:
                self.model.at_least_one(variables)
            if self._split(self.graph.producer.get(t, self.backward[0])):
                self.model.at_most_one(variables)

    def _add_writers(self, writers: dict[int, list[int]], i: int, variables: Iterable[int]) -> None:
        """Add the runs of operator i to those that write each tensor."""
        for (_, choice), v in zip(self.choices[i], variables, strict=True):
            for t in choice.writes:
                writers[t].append(v)

    def _split(self, k: int) -> bool:
        """Tell whether a backward operator may run twice, by one with fewer outputs each."""
        operator = self.graph.operators[k]
        whole = set(operator.writes)
        partial = any(not whole <= set(choice.writes) for _, choice in self.choices[k])
        return partial and operator.recomputable

    def _useful(self) -> list[frozenset[int]]:
        """Find for each stage the forward operators whose results it or a later one may need: no
        other runs again in it (the tighter bound of appendix A)."""
        useful: list[frozenset[int]] = []
        found: set[int] = set()
        for k in reversed(self.backward):
            stack = [t for _, choice in self.choices[k] for t in choice.reads]
            while stack:
                i = self.maker.get(stack.pop())
                if i is not None and i not in found:
                    found.add(i)
                    stack.extend(t for _, choice in self.choices[i] for t in choice.reads)
            operators = ((i, self.graph.operators[i]) for i in found)
            useful.append(
                frozenset(i for i, op in operators if op.recomputable and op.phase is Phase.FORWARD)
            )
        return useful[::-1]

    def _last_reader(self, among: Iterable[int]) -> dict[int, int]:
        """Map each forward tensor to the last operator of `among` that may read it."""
        return {t: j for j in sorted(among) for _, choice in self.choices[j] for t in choice.reads}

    def _forward_pass(self) -> None:
        """Add eq. 1, the choice of one implementation each, and the tensors that may be saved."""
        model, graph = self.model, self.graph
        last = self._last_reader(self.forward)
        writers: dict[int, list[int]] = defaultdict(list)
        for i in self.forward:
            model.exactly_one(self.d[i])
            held_bytes = self.bytes_of(t for t in writers if last.get(t, -1) >= i)
            saved = self.terms((t, self.s[0][t]) for t in writers if last.get(t, -1) < i)
            for (_, choice), chosen in zip(self.choices[i], self.d[i], strict=True):
                own = self.bytes_of(choice.writes) + choice.workspace_bytes
                model.memory(held_bytes + own, saved, chosen)
                for t in choice.reads:
                    if t not in graph.resident:
                        model.implies_any(chosen, writers[t])
            self._add_writers(writers, i, self.d[i])
        for t in self.made:
            model.implies_any(self.s[0][t], writers[t])
        if self.has_boundary:
            self.boundary_row(self.s[0].items())

    def _gradients(self, k: int) -> list[int]:
        """Return L̂_k: tensors of the backward (and tangents) that stage k finds and must keep."""
        later = {
            t for j in self.backward[k:] for _, choice in self.choices[j] for t in choice.reads
        } | self.graph.kept
        before = self.backward[:k]
        written = {t for j in before for _, choice in self.choices[j] for t in choice.writes}
        return sorted((written | set(self.graph.tangents)) & later)

    def _stage(self, k: int) -> None:
        """Add eq. 5-8 and 12 of one stage."""
        model, now, after = self.model, self.s[k], self.s[k + 1]
        found = self._gradients(k)
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
            model.implies_any(after[t], [now[t], *writers[t]])  # eq. 7, second part
        for (_, choice), v in zip(self.choices[index], chosen, strict=True):
            for t in choice.reads:
                if t in self.made:
                    model.implies_any(v, [now[t], *writers[t]])  # eq. 8
                    model.implies_any(v, [used[t]])
            own = self.bytes_of(t for t in choice.writes if t not in found)
            own += choice.workspace_bytes
            model.memory(gradient_bytes + own, self.terms(used.items()), v)  # eq. 5
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
                # A tensor of i that this implementation does not write may be saved already.
                rest = self.terms((t, now[t]) for t in own_tensors if t not in choice.writes)
                # The first copy of a result stays beside the one written again.
                own += self.bytes_of(t for t in choice.writes if t in self.graph.kept)
                model.memory(constant + own, terms + rest, v)  # eq. 12
                for t in choice.reads:
                    if t in self.made:
                        model.implies_any(v, [now[t], *writers[t]])  # eq. 7, first part

    def _reads_gradients(self, k: int, chosen: int, choice: Operator | Variant) -> None:
        """Require that the chosen implementations wrote an operator's gradients before."""
        writers: dict[int, list[int]] = defaultdict(list)
        for index, variables in zip(self.backward[:k], self.b, strict=False):
            self._add_writers(writers, index, variables)
        for t in choice.reads:
            if t not in (self.made.keys() | self.graph.resident | set(self.graph.tangents)):
                self.model.implies_any(chosen, writers[t])

    def hint(self, program: Program) -> None:
        """Start the solver from a program of the graph, as far as the class can express it."""
        found = list(first_runs(self.graph, program))
        for part in found[: self.first]:
            for i, name in part.runs.items():
                if i in self.forward:
                    self._hint_choice(i, name, self.d[i])
        first = [k for k, i in enumerate(self.backward) if k == 0 or self.backward[k - 1] != i]
        for k, part in zip(first, found[self.first :], strict=False):
            for t, v in self.s[k].items():
                self.model.hints[v] = t in part.live
            for i, variables in self.r[k].items():
                self._hint_choice(i, part.runs.get(i), variables, i in part.runs)
            index = self.backward[k]
            self._hint_choice(index, part.runs.get(index), self.b[k])

    def _hint_choice(
        self, i: int, name: str | None, variables: list[int], runs: bool = True
    ) -> None:
        for (other, _), v in zip(self.choices[i], variables, strict=True):
            self.model.hints[v] = runs and other == name

    def program(self, values: tuple[bool, ...]) -> Program:
        """Read the program of a solution; its replayed peak is at most the model's."""
        forward = [run for i in self.forward for run in self.chosen(i, self.d[i], values)]
        instructions = [*forward, *self.boundary()]
        for k, index in enumerate(self.backward):
            for i, variables in (*self.r[k].items(), (index, self.b[k])):
                instructions += self.chosen(i, variables, values)
        return Program(with_frees(self.graph, instructions))

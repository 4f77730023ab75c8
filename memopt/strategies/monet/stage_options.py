"""Menus: ways to save less of a stage and run part of it again inside its backward.

For a price λ of a byte, the best choice is a minimum cut: a tensor that the backward needs is
either saved (λ · bytes) or its operator runs again (its time), and then needs its own operands.
The stage's input a^{ℓ-1} and its output a^ℓ are there in any case. Sweeping λ gives the lower
convex hull of saved bytes against time, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memopt.models.chain import Stage
from memopt.models.graph import Graph
from memopt.models.linearize import Linearization
from memopt.models.stage_map import StageOperators

PRICES = 24
MOST = 6


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a stage for its backward.

    Attributes:
        backward: the operators of B^ℓ, those that run again among them, in order.
        saved_bytes, backward_time_s: ω_ā and u_b of the chain under this option.
        forward_overhead_bytes, backward_overhead_bytes: o_f of F_all and o_b.
    """

    backward: tuple[int, ...]
    saved_bytes: int
    backward_time_s: float
    forward_overhead_bytes: int
    backward_overhead_bytes: int


def menus(view: Linearization) -> list[list[Option]]:
    """The options of every stage of the chain, the first of each being the plain one."""
    known: dict[object, list[tuple[frozenset[int], tuple[int, ...]]]] = {}
    found: list[list[Option]] = []
    for k, stage in enumerate(view.chain.stages):
        plain = _plain(view, k, stage)
        found.append([plain])
        if k >= len(view.stages):
            continue
        work = _Stage(view, k)
        key = work.signature()
        if key not in known:
            known[key] = work.choices()
        seen = {(plain.saved_bytes, plain.backward_time_s)}
        for saved, again in known[key]:
            option = work.option(saved, again)
            mark = (option.saved_bytes, option.backward_time_s)
            if mark not in seen and option.saved_bytes < plain.saved_bytes:
                seen.add(mark)
                found[-1].append(option)
    return found


def _plain(view: Linearization, k: int, stage: Stage) -> Option:
    backward = view.stages[k].backward if k < len(view.stages) else ()
    return Option(
        backward,
        stage.saved_bytes,
        stage.backward_time_s,
        stage.forward_overhead_bytes,
        stage.backward_overhead_bytes,
    )


class _Stage:
    """One stage; tensors and operators by their place in it, so that repeated ones are alike."""

    def __init__(self, view: Linearization, k: int) -> None:
        self.graph: Graph = view.graph
        self.stage: StageOperators = view.stages[k]
        self.chain_stage = view.chain.stages[k]
        previous = view.stages[k - 1] if k else None
        self.source = frozenset(
            () if previous is None or previous.output is None else {previous.output}
        )
        self.later = previous.gradients if previous is not None else frozenset()
        own: dict[int, None] = {}
        for i in (*self.stage.forward, *self.stage.backward):
            operator = self.graph.operators[i]
            own.update(dict.fromkeys((*operator.reads, *operator.writes)))
        self.local = {t: n for n, t in enumerate(own)}
        self.tensors = list(own)
        self.size = {t: self.graph.tensors[t].size_bytes for t in self.tensors}
        self.producer = {t: i for i in self.stage.rerun for t in self.graph.operators[i].writes}

    def signature(self) -> object:
        """Equal for stages that are the same problem."""
        place = {i: n for n, i in enumerate((*self.stage.forward, *self.stage.backward))}
        operators = tuple(
            (
                tuple(self.local[t] for t in op.reads),
                tuple(self.local[t] for t in op.writes),
                op.time_s,
                op.workspace_bytes,
                op.recomputable,
            )
            for op in (self.graph.operators[i] for i in place)
        )
        return (
            operators,
            len(self.stage.forward),
            tuple(self.size[t] for t in self.tensors),
            tuple(sorted(self.local[t] for t in self.stage.saved if t in self.local)),
            tuple(sorted(place[i] for i in self.stage.rerun)),
            tuple(self.local.get(t, -1) for t in sorted(self.source)),
        )

    def choices(self) -> list[tuple[frozenset[int], tuple[int, ...]]]:
        """(places of what is saved, places in `forward` of what runs again), for some prices."""
        saved = [t for t in self.stage.saved if t != self.stage.output and self.size.get(t)]
        if not saved:
            return []
        total_s = sum(self.graph.operators[i].time_s for i in self.stage.rerun)
        total = sum(self.size[t] for t in saved)
        place = {i: n for n, i in enumerate(self.stage.forward)}
        found: dict[tuple[frozenset[int], tuple[int, ...]], int] = {}
        if total_s <= 0:
            return []
        for step in range(PRICES):
            price = total_s / total * 2.0 ** (step - PRICES * 2 // 3)
            kept, again = self._cut(price)
            key = (
                frozenset(self.local[t] for t in kept),
                tuple(sorted(place[i] for i in again)),
            )
            found.setdefault(key, sum(self.size[t] for t in kept))
        ordered = sorted(found, key=lambda key: -found[key])
        if len(ordered) <= MOST:
            return ordered
        return [ordered[n * (len(ordered) - 1) // (MOST - 1)] for n in range(MOST)]

    def _cut(self, price: float) -> tuple[set[int], set[int]]:
        """(tensors saved, operators that run again) of least price · bytes + seconds."""
        import networkx

        net = networkx.DiGraph()
        unit = 1e-13 + sum(self.graph.operators[i].time_s for i in self.stage.rerun) / 2**40
        free = self.source | ({self.stage.output} if self.stage.output is not None else set())
        for i in self.stage.rerun:
            operator = self.graph.operators[i]
            if operator.recomputable:
                net.add_edge("s", ("op", i), capacity=int(operator.time_s / unit) + 1)
            else:
                net.add_edge("s", ("op", i))
            for t in operator.reads:
                if t in self.producer and t not in free:
                    net.add_edge(("need", t), ("op", i))
            for t in operator.writes:
                cost = int(price * self.size[t] / unit)
                net.add_edge(("have", t), ("need", t), capacity=cost)
                net.add_edge(("op", i), ("have", t))
        wanted = {t for i in self.stage.backward for t in self.graph.operators[i].reads}
        wanted = {t for t in wanted if t in self.producer and t not in free}
        if not wanted:
            return set(), set()
        for t in wanted:
            net.add_edge(("need", t), "t")
        _, (_, sink) = networkx.minimum_cut(net, "s", "t")
        kept = {t for t in self.producer if ("need", t) in sink and ("have", t) not in sink}
        return kept, {i for i in self.stage.rerun if ("op", i) in sink}

    def option(self, saved: frozenset[int], again: tuple[int, ...]) -> Option:
        """The option's figures, by replaying the stage's own operators."""
        graph, stage = self.graph, self.stage
        output = frozenset(() if stage.output is None else {stage.output})
        kept = frozenset(self.tensors[n] for n in saved) | output
        backward = self._backward({stage.forward[n] for n in again}, kept | self.source)
        seconds = sum(graph.operators[i].time_s for i in backward)
        saved_bytes = self._bytes(kept)
        forward = self._peak(stage.forward, self.source, self.source | kept)
        before = self.source | kept | stage.gradients
        peak = self._peak(backward, before, self.source | self.later | stage.results)
        counted = (self.source, kept, stage.gradients, self.later, stage.results)
        return Option(
            backward,
            saved_bytes,
            seconds,
            max(0, forward - self._bytes(self.source) - saved_bytes),
            peak - sum(map(self._bytes, counted)),
        )

    def _backward(self, again: set[int], have: frozenset[int]) -> tuple[int, ...]:
        """The backward, each operator that runs again put just before it is needed."""
        done: set[int] = set()
        sequence: list[int] = []

        def make(t: int) -> None:
            i = self.producer.get(t)
            if t in have or i is None or i not in again or i in done:
                return
            done.add(i)
            for operand in self.graph.operators[i].reads:
                make(operand)
            sequence.append(i)

        for i in self.stage.backward:
            for t in self.graph.operators[i].reads:
                make(t)
            sequence.append(i)
        return tuple(sequence)

    def _bytes(self, tensors: Iterable[int]) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in tensors)

    def _peak(self, operators: Sequence[int], before: frozenset[int], after: frozenset[int]) -> int:
        """Peak bytes of running operators from `before`, leaving `after`."""
        last = {t: n for n, i in enumerate(operators) for t in self.graph.operators[i].reads}
        live = {t: self.graph.tensors[t].size_bytes for t in before if t in last or t in after}
        peak = total = sum(live.values())
        for n, i in enumerate(operators):
            operator = self.graph.operators[i]
            peak = max(peak, total + self._bytes(operator.writes) + operator.workspace_bytes)
            for t in operator.writes:
                if (last.get(t, -1) > n or t in after) and t not in live:
                    live[t] = self.graph.tensors[t].size_bytes
                    total += live[t]
            for t in dict.fromkeys(operator.reads):
                if last[t] == n and t not in after:
                    total -= live.pop(t, 0)
        return peak

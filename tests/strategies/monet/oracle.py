"""Brute force over the programs' own classes, by shortest paths over what is saved between
stages. It shares nothing with the solver but the graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant, variant

Choice = Operator | Variant


def subsets(items: frozenset[int]) -> Iterator[frozenset[int]]:
    """Every subset."""
    ordered = sorted(items)
    every = chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1))
    return map(frozenset, every)


class Brute:
    """The least time of MONeT's class under MONeT's own count of memory."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.limit = budget_bytes - graph.resident_bytes
        self.split = graph.first_backward
        self.count = len(graph.operators)
        self.choices: list[list[Choice]] = [
            [op, *(variant(op, c.name) for c in op.implementations)] for op in graph.operators
        ]
        self.owner = {t: i for i in range(self.split) for c in self.choices[i] for t in c.writes}
        self.kept = frozenset(graph.kept) & set(self.owner)

    def size(self, tensors: object) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in tensors)  # type: ignore[attr-defined]

    def readers(self, operators: list[int], low: int) -> set[int]:
        return {t for j in operators if j >= low for c in self.choices[j] for t in c.reads}

    def best_s(self) -> float:
        states: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        for saved, seconds in self.forward():
            key = (saved, frozenset())
            states[key] = min(seconds, states.get(key, float("inf")))
        for k in range(self.split, self.count):
            following: dict[tuple[frozenset[int], frozenset[int]], float] = {}
            for (saved, grads), seconds in states.items():
                for key, more in self.stage(k, saved, grads):
                    value = seconds + more
                    if value < following.get(key, float("inf")):
                        following[key] = value
            states = following
        return min(states.values(), default=float("inf"))

    def forward(self) -> Iterator[tuple[frozenset[int], float]]:
        forward = list(range(self.split))
        for picked in product(*(self.choices[i] for i in forward)):
            written = {t for c in picked for t in c.writes}
            if any(
                t in self.owner and t not in {w for c in picked[:i] for w in c.writes}
                for i, choice in enumerate(picked)
                for t in choice.reads
            ):
                continue
            for saved in subsets(frozenset(written)):
                if not self.kept <= saved:
                    continue
                fits = self.size(saved | set(self.graph.tangents)) <= (
                    self.limit - self.graph.boundary_bytes
                )
                for i, choice in enumerate(picked):
                    before = {t for t, j in self.owner.items() if j < i}
                    local = before & self.readers(forward, i)
                    # What no chosen implementation writes cannot be saved, so is not counted.
                    held = local | (before & saved)
                    own = self.size(choice.writes) + choice.workspace_bytes
                    fits = fits and self.size(held) + own <= self.limit
                if fits:
                    yield saved, sum(c.time_s for c in picked)

    def stage(
        self, k: int, saved: frozenset[int], grads: frozenset[int]
    ) -> Iterator[tuple[tuple[frozenset[int], frozenset[int]], float]]:
        read = self.readers(list(range(k, self.count)), k)
        gone = {t for j in range(self.split, k) for c in self.choices[j] for t in c.writes}
        gradient = self.size((gone | set(self.graph.tangents)) & (read | self.graph.kept))
        # What the step returns is saved throughout, so that nothing runs again for it alone.
        useful, stack = set(), list(read)
        while stack:
            i = self.owner.get(stack.pop())
            if i is not None and i not in useful:
                useful.add(i)
                stack.extend(t for c in self.choices[i] for t in c.reads)
        again = sorted(i for i in useful if self.graph.operators[i].recomputable)
        options: list[list[Choice | None]] = [[None, *self.choices[i]] for i in again]
        for picked in product(*options):
            have, legal = set(saved), True
            for choice in picked:
                if choice is not None:
                    legal = legal and all(t in have for t in choice.reads if t in self.owner)
                    have |= set(choice.writes)
            if not legal:
                continue
            run = [(i, c) for i, c in zip(again, picked, strict=True) if c is not None]
            seconds = sum(c.time_s for _, c in run)
            for choice in self.choices[k]:
                needs = {t for t in choice.reads if t in self.owner}
                made = {t for t in choice.reads if t not in self.owner}
                made -= self.graph.resident | set(self.graph.tangents)
                if not needs <= have or not made <= grads:
                    continue
                for after in subsets(frozenset(have)):
                    if not self.kept <= after or (k == self.count - 1 and after != self.kept):
                        continue
                    held = after | needs
                    own = self.size(choice.writes) + choice.workspace_bytes
                    fits = gradient + self.size(held) + own <= self.limit
                    for i, c in run:
                        fits = (
                            fits and gradient + self.again(i, c, again, saved, held) <= self.limit
                        )
                    if fits:
                        key = (after, grads | set(choice.writes))
                        yield key, seconds + choice.time_s

    def again(
        self, i: int, c: Choice, again: list[int], saved: frozenset[int], held: set[int]
    ) -> int:
        """Eq. 3 with the bound of appendix A."""
        readers = self.readers(again, i)
        total = self.size(c.writes) + c.workspace_bytes + self.size(self.kept & set(c.writes))
        for t, j in self.owner.items():
            if (
                (j < i and (t in readers or t in held))
                or (j > i and t in saved)
                or (j == i and t not in c.writes and t in saved)
            ):
                total += self.size((t,))
        return total

"""What `benchmarks.offload_paper` keeps of one chain under one budget, and sums over such rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MODELS = ("interruptible", "whole", "program")
"""The paper's model with interruptible and with whole transfers, and memopt's programs."""


@dataclass
class Row:
    """One chain under one budget.

    Attributes:
        family, depth, image, batch: the network and what it is trained on.
        own: memopt's own stages instead of the paper's.
        stages: of the chain, the loss included.
        share: of the way from the floor to M_peak.
        budget_bytes: total, resident included.
        proposition_3_s: the paper's lower bound.
        bound_s: max(Proposition 3, fractional optimum).
        times_s: strategy → time in each of `MODELS`, and of solving; absent: no plan.
        link: bandwidth over the paper's.
        best_whole_s: the least time of all sets of activations, ordered, with whole transfers;
            None: too many sets to try.
    """

    family: str
    depth: int
    image: int
    batch: int
    own: bool
    stages: int
    share: float
    budget_bytes: int
    proposition_3_s: float
    bound_s: float
    times_s: dict[str, list[float]]
    link: float = 1.0
    best_whole_s: float | None = None

    @property
    def network(self) -> str:
        """As the paper writes it."""
        return {"resnet": "ResNet-", "densenet": "DenseNet-", "inception": "Inception-v"}[
            self.family
        ] + str(self.depth)

    def ratio(self, name: str, model: str) -> float | None:
        """A strategy's time over the bound; None where it has no plan."""
        times = self.times_s.get(name)
        return None if times is None else times[MODELS.index(model)] / self.bound_s

    def __str__(self) -> str:
        return f"{self.network}, {self.image}x{self.image}, batch {self.batch}, {self.share:.0%}"


def ratios(rows: Iterable[Row], name: str, model: str) -> list[float]:
    """Times over the bound where the strategy has a plan."""
    return [found for row in rows if (found := row.ratio(name, model)) is not None]


def slower(
    rows: Iterable[Row], name: str, other: str, model: str, tolerance: float = 1e-9
) -> tuple[int, list[tuple[Row, float]]]:
    """In how many rows both have plans, and those where `name` is slower, with the quotient."""
    both = 0
    found = []
    for row in rows:
        mine, others = row.ratio(name, model), row.ratio(other, model)
        if mine is None or others is None:
            continue
        both += 1
        if mine > others * (1 + tolerance):
            found.append((row, mine / others))
    return both, found


def rises(series: Iterable[Sequence[Row]], name: str, model: str) -> tuple[int, int]:
    """How often the next row of a series is slower, of how many steps; each series gets more
    memory, or a faster link, from row to row."""
    count = steps = 0
    index = MODELS.index(model)
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, series)):
        low, high = before.times_s.get(name), after.times_s.get(name)
        if low is None or high is None:
            continue
        steps += 1
        count += high[index] > low[index] * (1 + 1e-9)
    return count, steps


def by_budget(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each chain on each link, budgets ascending."""
    return _series(rows, lambda r: (r.network, r.image, r.batch, r.own, r.link), lambda r: r.share)


def by_link(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each chain under each budget, links from slow to fast; several of them."""
    found = _series(rows, lambda r: (r.network, r.image, r.batch, r.own, r.share), lambda r: r.link)
    return [one for one in found if len(one) > 1]


def _series(
    rows: Iterable[Row], key: Callable[[Row], object], order: Callable[[Row], float]
) -> list[list[Row]]:
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [sorted(one, key=order) for one in found.values()]

"""Globals, closures, arguments, banks: what a forward leaves in Python objects outside."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.surroundings.situation import (
    Net,
    Setting,
    Tracker,
    mean_square,
    situation,
)

AUXILIARY: list[Tensor] = []
FEATURES: dict[str, Tensor] = {}
TRACKER = Tracker()
COUNTED = 0
STATISTICS: defaultdict[str, list[Tensor]] = defaultdict(list)
SHAPES: set[tuple[int, ...]] = set()
NUMBERS = itertools.count()
BANK: deque[Tensor] = deque(maxlen=2)
RUNNING = torch.zeros(8)
WEIGHTS: dict[str, float] = {}


class WithList(Net):
    def touch(self, h: Tensor) -> Tensor:
        AUXILIARY.append(h.square().mean())
        return h


def with_auxiliary(output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output, target) + sum(AUXILIARY)


@situation("a global list of losses", "AUXILIARY", quick=True)
def _() -> Setting:
    AUXILIARY.clear()
    return Setting(WithList(), lambda: AUXILIARY, with_auxiliary, after=lambda _: AUXILIARY.clear())


@situation("a global list that grows", "AUXILIARY")
def _() -> Setting:
    class Detached(Net):
        def touch(self, h: Tensor) -> Tensor:
            AUXILIARY.append(h.detach().mean())
            return h

    AUXILIARY.clear()
    return Setting(Detached(), lambda: AUXILIARY)


class WithFeatures(Net):
    def touch(self, h: Tensor) -> Tensor:
        FEATURES["hidden"] = h
        return h


@situation("a global dict of features", "FEATURES")
def _() -> Setting:
    FEATURES.clear()
    return Setting(
        WithFeatures(),
        lambda: FEATURES,
        lambda y, t: mean_square(y, t) + FEATURES["hidden"].abs().mean(),
    )


class WithTracker(Net):
    def touch(self, h: Tensor) -> Tensor:
        TRACKER.keep(h.detach())
        return h


@situation("a global tracker object", "TRACKER|Tracker|kept|count")
def _() -> Setting:
    TRACKER.kept, TRACKER.count = [], 0
    return Setting(WithTracker(), lambda: TRACKER)


class OnClass(Net):
    latest: ClassVar[Tensor | None] = None
    count: ClassVar[int] = 0

    def touch(self, h: Tensor) -> Tensor:
        OnClass.latest = h.detach()
        return h


@situation("a class attribute gets a tensor", "OnClass|latest")
def _() -> Setting:
    OnClass.latest = None
    return Setting(OnClass(), lambda: OnClass.latest)


class CountedOnClass(Net):
    count: ClassVar[int] = 0

    def touch(self, h: Tensor) -> Tensor:
        CountedOnClass.count += 1
        return h


@situation("a class counter", "CountedOnClass|count")
def _() -> Setting:
    CountedOnClass.count = 0
    return Setting(CountedOnClass(), lambda: CountedOnClass.count)


class CountedGlobally(Net):
    def touch(self, h: Tensor) -> Tensor:
        global COUNTED
        COUNTED += 1
        return h


@situation("a global counter", "COUNTED", quick=True)
def _() -> Setting:
    global COUNTED
    COUNTED = 0
    return Setting(CountedGlobally(), lambda: COUNTED)


class Scheduled(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h * WEIGHTS["hidden"]


@situation("a schedule in a global, read by the forward", "WEIGHTS")
def _() -> Setting:
    WEIGHTS["hidden"] = 1.0

    def after(step: int) -> None:
        WEIGHTS["hidden"] = 0.5 ** (step + 1)

    return Setting(Scheduled(), lambda: WEIGHTS, after=after)


class CalledBack(Net):
    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.callback = callback

    def touch(self, h: Tensor) -> Tensor:
        self.callback(h)
        return h


@situation("a closure's list", "kept|callback")
def _() -> Setting:
    kept: list[Tensor] = []

    def callback(h: Tensor) -> None:
        kept.append(h.detach())

    return Setting(CalledBack(callback), lambda: kept)


@situation("a closure's counter", "count|callback")
def _() -> Setting:
    count = 0

    def callback(_h: Tensor) -> None:
        nonlocal count
        count += 1

    return Setting(CalledBack(callback), lambda: count)


@situation("a function's attribute", "calls|callback")
def _() -> Setting:
    def callback(_h: Tensor) -> None:
        callback.calls += 1  # type: ignore[attr-defined]

    callback.calls = 0  # type: ignore[attr-defined]
    return Setting(CalledBack(callback), lambda: callback.calls)  # type: ignore[attr-defined]


@situation("a callable object as callback", "Tracker|kept|count|callback|keep")
def _() -> Setting:
    tracker = Tracker()
    return Setting(CalledBack(tracker.keep), lambda: tracker.count)


class Arguments(Net):
    """Takes a container in which it leaves something."""

    def __init__(self, leave: Any) -> None:
        super().__init__()
        self.leave = leave

    def forward(self, x: Tensor, held: Any) -> Tensor:
        h = torch.tanh(self.first(x))
        self.leave(held, h)
        y: Tensor = self.last(h)
        return y


def argued(leave: Any, make: Any, look: Any = lambda held: held) -> Setting:
    """A setting whose forward gets a fresh container in each step, which is looked at."""
    last = [make()]

    def inputs(_step: int) -> tuple[Any]:
        last[0] = make()
        return (last[0],)

    return Setting(Arguments(leave), lambda: look(last[0]), inputs=inputs)


@situation("a list argument is appended to", r"held|argument|list")
def _() -> Setting:
    return argued(lambda held, h: held.append(h.detach()), list)


@situation("a dict argument is filled", r"held|argument|dict")
def _() -> Setting:
    def leave(held: Any, h: Tensor) -> None:
        held["hidden"] = h.detach()

    return argued(leave, lambda: {"start": torch.zeros(1)})


@situation("an object argument is changed", r"held|argument|Tracker")
def _() -> Setting:
    return argued(lambda held, h: held.keep(h.detach()), Tracker)


class Cached(Net):
    """A cache of keys that grows in an argument of its own class."""

    def forward(self, x: Tensor, cache: Tracker) -> Tensor:
        h = torch.tanh(self.first(x))
        cache.keep(h.detach())
        y: Tensor = self.last(torch.stack(cache.kept).mean(0))
        return y


@situation("a cache argument that lives on", r"cache|Tracker|argument")
def _() -> Setting:
    cache = Tracker()
    return Setting(Cached(), lambda: cache, inputs=lambda _: (cache,))


class Banked(Net):
    def touch(self, h: Tensor) -> Tensor:
        BANK.append(h.detach())
        return h + torch.stack(list(BANK)).mean(0)


@situation(
    "a deque as memory bank", "BANK|deque", torchs="Dynamo does not see what a full deque drops"
)
def _() -> Setting:
    BANK.clear()
    return Setting(Banked(), lambda: BANK)


class InDefault(Net):
    def touch(self, h: Tensor) -> Tensor:
        STATISTICS["mean"].append(h.detach().mean())
        return h


@situation("a defaultdict of lists", "STATISTICS|defaultdict")
def _() -> Setting:
    STATISTICS.clear()
    return Setting(InDefault(), lambda: STATISTICS)


class InSet(Net):
    def touch(self, h: Tensor) -> Tensor:
        SHAPES.add(tuple(h.shape))
        return h


@situation("a set of shapes", "SHAPES")
def _() -> Setting:
    SHAPES.clear()
    return Setting(InSet(), lambda: SHAPES)


class Numbered(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h * (1 + next(NUMBERS))


@situation("itertools.count", "NUMBERS|count")
def _() -> Setting:
    global NUMBERS
    NUMBERS = itertools.count()
    return Setting(Numbered(), lambda: repr(NUMBERS))


class InPlaceGlobal(Net):
    def touch(self, h: Tensor) -> Tensor:
        RUNNING.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - RUNNING


@situation("a global tensor is updated in place", "RUNNING", exact=("plan", "wrap"))
def _() -> Setting:
    RUNNING.zero_()
    return Setting(InPlaceGlobal(), lambda: RUNNING)


class ReboundGlobal(Net):
    def touch(self, h: Tensor) -> Tensor:
        global RUNNING
        RUNNING = 0.9 * RUNNING + 0.1 * h.detach().mean(0)
        return h - RUNNING


@situation("a global tensor is bound anew", "RUNNING")
def _() -> Setting:
    global RUNNING
    RUNNING = torch.zeros(8)
    return Setting(ReboundGlobal(), lambda: RUNNING)

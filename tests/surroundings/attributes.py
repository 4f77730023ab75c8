"""Attributes, classes, caches, variables of a thread or a context, that a forward changes."""

from __future__ import annotations

import contextvars
import enum
import functools
import io
import itertools
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.surroundings.situation import (
    MODULE_WAYS,
    Net,
    Setting,
    Tracker,
    mean_square,
    situation,
)

CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("layers", default=0)
LOCAL = threading.local()
OUTBOX: queue.Queue[Any] = queue.Queue()
TEXT = io.StringIO()


class Generating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rates = (1 / n for n in itertools.count(1))

    def touch(self, h: Tensor) -> Tensor:
        return h * next(self.rates)


@situation("a generator object is kept", "rates|generator|next")
def _() -> Setting:
    return Setting(Generating())


class Weakly(Net):
    def __init__(self) -> None:
        super().__init__()
        self.names: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def touch(self, h: Tensor) -> Tensor:
        self.names[self.last] = self.names.get(self.last, 0) + 1
        return h


@situation("a WeakKeyDictionary counts", "names|WeakKeyDictionary")
def _() -> Setting:
    model = Weakly()
    return Setting(model, lambda: dict(model.names))


class InNumpy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.usage = np.zeros(2)

    def touch(self, h: Tensor) -> Tensor:
        self.usage[0] += h.shape[0]
        return h


@situation("a NumPy array as attribute", "usage|ndarray|NumPy|numpy")
def _() -> Setting:
    return Setting(InNumpy())


class InDataclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = Tracker()

    def touch(self, h: Tensor) -> Tensor:
        self.state.count += 1
        return h


@situation("a dataclass attribute counts", "state|count|Tracker")
def _() -> Setting:
    return Setting(InDataclass())


class Phase(enum.Enum):
    WARMUP = 0
    MAIN = 1


class Phased(Net):
    phase = Phase.WARMUP

    def touch(self, h: Tensor) -> Tensor:
        h = h * 0.1 if self.phase is Phase.WARMUP else h
        self.phase = Phase.MAIN
        return h


@situation("an Enum state advances", "phase")
def _() -> Setting:
    model = Phased()
    return Setting(model, lambda: model.phase)


@functools.lru_cache
def positions(n: int) -> Tensor:
    MADE.append(n)
    return torch.linspace(0, 1, n)


MADE: list[int] = []


class WithCache(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h + positions(h.shape[-1])


@situation("a helper under lru_cache", "positions|lru_cache|MADE")
def _() -> Setting:
    MADE.clear()
    positions.cache_clear()
    return Setting(WithCache())


class Attention(Net):
    last_attention: Any = None

    def touch(self, h: Tensor) -> Tensor:
        self.last_attention = h.softmax(-1)
        return h


@situation("self.last_attention is set", "last_attention", quick=True)
def _() -> Setting:
    model = Attention()
    return Setting(
        model, loss=lambda y, t: mean_square(y, t) + model.last_attention.square().mean()
    )


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def touch(self, h: Tensor) -> Tensor:
        self.outputs.append(h)
        return h


@situation("a list in self is appended to", "outputs", quick=True)
def _() -> Setting:
    model = Listed()
    return Setting(
        model,
        loss=lambda y, t: mean_square(y, t) + model.outputs[-1].abs().mean(),
        after=lambda _: model.outputs.clear(),
    )


class CountedInSelf(Net):
    steps = 0

    def touch(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h * 0.9**self.steps


@situation("a counter in self changes the forward", "steps")
def _() -> Setting:
    model = CountedInSelf()
    return Setting(model, lambda: model.steps)


class Memoized(Net):
    @functools.cached_property
    def table(self) -> Tensor:
        MADE.append(1)
        return torch.linspace(0, 1, 8)

    def touch(self, h: Tensor) -> Tensor:
        return h + self.table


@situation("a cached_property is filled", "table|cached_property")
def _() -> Setting:
    MADE.clear()
    return Setting(Memoized(), lambda: MADE)


class ByShape(Net):
    tables: ClassVar[dict[int, Tensor]] = {}

    def touch(self, h: Tensor) -> Tensor:
        n = h.shape[-1]
        if n not in ByShape.tables:
            ByShape.tables[n] = torch.linspace(0, 1, n)
        return h + ByShape.tables[n]


@situation("a class's cache by shape", "tables")
def _() -> Setting:
    ByShape.tables.clear()
    return Setting(ByShape(), lambda: ByShape.tables)


class InContext(Net):
    def touch(self, h: Tensor) -> Tensor:
        CURRENT.set(CURRENT.get() + 1)
        return h * (1 + CURRENT.get())


@situation("a context variable is set", "CURRENT|layers|[Cc]ontext", quick=True)
def _() -> Setting:
    CURRENT.set(0)
    return Setting(InContext(), lambda: CURRENT)


class InThreadLocal(Net):
    def touch(self, h: Tensor) -> Tensor:
        LOCAL.count += 1
        return h


@situation("a thread-local counter", "LOCAL|local|count")
def _() -> Setting:
    LOCAL.count = 0
    return Setting(InThreadLocal(), lambda: LOCAL.count)


class Queued(Net):
    def touch(self, h: Tensor) -> Tensor:
        OUTBOX.put(h.detach())
        return h


@situation("a queue.Queue is fed", "OUTBOX|[Qq]ueue|put")
def _() -> Setting:
    OUTBOX.queue.clear()
    return Setting(Queued(), lambda: OUTBOX)


class Tallied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tally: Counter[str] = Counter()
        self.order: OrderedDict[str, int] = OrderedDict()

    def touch(self, h: Tensor) -> Tensor:
        self.tally["steps"] += h.shape[0]
        self.order["last"] = 1
        return h


@situation("a Counter and an OrderedDict", "tally|order|Counter")
def _() -> Setting:
    return Setting(Tallied())


class Written(Net):
    def touch(self, h: Tensor) -> Tensor:
        TEXT.write(f"{tuple(h.shape)}\n")
        return h


@situation("text is written to a StringIO", "TEXT|StringIO|write")
def _() -> Setting:
    TEXT.seek(0)
    TEXT.truncate()
    return Setting(Written(), lambda: TEXT)


class Descriptor:
    """Counts how often it is read."""

    reads = 0

    def __get__(self, owner: Any, _kind: Any) -> float:
        Descriptor.reads += 1
        return 0.5


class Described(Net):
    rate = Descriptor()

    def touch(self, h: Tensor) -> Tensor:
        return h * self.rate


@situation("a descriptor that counts its reads", "reads|Descriptor|rate")
def _() -> Setting:
    Descriptor.reads = 0
    return Setting(Described(), lambda: Descriptor.reads)


class Guarded(Net):
    """Counts what is set on it, by a `__setattr__` of its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "marked":
            WRITES.append(name)
        super().__setattr__(name, value)

    def touch(self, h: Tensor) -> Tensor:
        self.marked = True
        return h


WRITES: list[str] = []


@situation("a __setattr__ that records", "marked|WRITES|__setattr__")
def _() -> Setting:
    model = Guarded()
    model.marked = True
    WRITES.clear()
    return Setting(model, lambda: WRITES)


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class WithSlots(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slot = Slotted()

    def touch(self, h: Tensor) -> Tensor:
        self.slot.value = h.detach()
        return h


@situation("an object with __slots__", "slot|Slotted|value")
def _() -> Setting:
    model = WithSlots()
    return Setting(model, lambda: model.slot.value)


class Loose(Net):
    """Its forward uses a parameter that it does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Parameter(torch.ones(8))]

    def touch(self, h: Tensor) -> Tensor:
        return h * self.held[0]


@situation("a parameter in a list of self", "held", exact=MODULE_WAYS)
def _() -> Setting:
    model = Loose()
    return Setting(model, lambda: [model.held, model.held[0].grad])


class Timed(Net):
    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def touch(self, h: Tensor) -> Tensor:
        self._times.append(time.perf_counter())
        return h


@situation("a list of times", "_times|perf_counter")
def _() -> Setting:
    model = Timed()
    return Setting(model, lambda: len(model._times))


class SetToItself(Net):
    rate = 1

    def touch(self, h: Tensor) -> Tensor:
        self.rate = getattr(self, "rate", 1)
        return h * self.rate


@situation("an attribute set to itself", "rate", exact=("wrap",), quick=True)
def _() -> Setting:
    model = SetToItself()
    model.rate = 1  # and the loop changes it
    return Setting(model, after=lambda step: setattr(model, "rate", step + 2))

"""Ways in which a forward leaves a trace outside of its module, for test_leaves_no_trace."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn


class Making(dict[str, Any]):
    """Makes what it is asked for."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        Making.made += 1
        return super().__getitem__(key)

    def items(self) -> Any:
        raise AssertionError("asked for all it holds")

    values = get = items


AUX: list[Tensor] = []
MAKING = Making(a=1)
BY_NAME: dict[str, Any] = {}
COUNTER = 0
COUNTS = np.zeros(3)
RNG = random.Random(0)
NUMPY_RNG = np.random.default_rng(0)
TORCH_RNG = torch.Generator()
HERE = threading.local()
HERE.seen = []
WEAK: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
NAMES = types.SimpleNamespace(last=None, seen=[])
COUNTED: Counter[str] = Counter()
GROUPS: defaultdict[str, list[int]] = defaultdict(list)
LAST_SEEN: deque[int] = deque(maxlen=2)
ORDERED: OrderedDict[str, int] = OrderedDict()
USER_DICT: UserDict[str, int] = UserDict()
SET = {1}
STATE = types.ModuleType("user_state")
STATE.__dict__.update(calls=0, seen=[])
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT")


class Tracker:
    """Keeps values of a forward."""

    total = 0
    names: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.losses: list[Tensor] = []
        self.inner: Any = None

    def add(self, value: Tensor) -> None:
        """Keep one."""
        with self.lock:
            self.losses.append(value)
        self.inner = value
        type(self).total += 1
        self._note("added")

    def _note(self, name: str) -> None:
        Tracker.names.append(name)
        self.note = name

    def __iadd__(self, value: Tensor) -> Tracker:
        self.losses.append(value)
        return self


class Slotted:
    """Has no `__dict__`."""

    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count, self.seen = 0, [0]


@dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to."""

    seen: list[int] = field(default_factory=list)


TRACKER, SLOTTED, FROZEN = Tracker(), Slotted(), Frozen()


class Base(nn.Module):
    """A linear layer, and `touch`, which leaves a trace."""

    calls: ClassVar[int] = 0

    def __init__(self, touch: Callable[[Base, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.touch, self.kept = nn.Linear(4, 4), touch, [0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.touch(self, y)
        return y


def _global(_model: Base, _y: Tensor) -> None:
    global COUNTER
    COUNTER += 1


def _new_global(_model: Base, y: Tensor) -> None:
    global NEW_ONE
    NEW_ONE = y


def _class(model: Base, _y: Tensor) -> None:
    type(model).calls += 1
    Base.added = 1  # type: ignore[attr-defined]


def _closure() -> Callable[..., Any]:
    count, seen = 0, []

    def touch(_model: Base | None, y: Tensor | None) -> Any:
        nonlocal count
        if y is None:
            return count, len(seen)
        count += 1
        seen.append(y)
        return None

    return touch


_COUNTING = _closure()


def _of_function(_model: Base, _y: Tensor) -> None:
    _of_function.calls += 1  # type: ignore[attr-defined]


_of_function.calls = 0  # type: ignore[attr-defined]


def _default(_model: Base, y: Tensor, seen: list[Tensor] = []) -> None:  # noqa: B006
    seen.append(y)


def _slotted(_model: Base, _y: Tensor) -> None:
    SLOTTED.count += 1
    SLOTTED.seen.append(1)


def _named(_model: Base, y: Tensor) -> None:
    NAMES.last = y
    NAMES.seen.append(y)


def _module(_model: Base, y: Tensor) -> None:
    STATE.calls += 1
    STATE.seen.append(y)


def _tracked(_model: Base, y: Tensor) -> None:
    TRACKER.add(y)


def _added(_model: Base, y: Tensor) -> None:
    global TRACKER
    TRACKER += y


def _by_string(_model: Base, y: Tensor) -> None:
    setattr(TRACKER, "inner", y)  # noqa: B010


def _several(_model: Base, _y: Tensor) -> None:
    COUNTED.update("ab")
    GROUPS["a"].append(1)
    LAST_SEEN.append(1)
    ORDERED["a"] = 1
    USER_DICT["a"] = 1
    SET.add(2)
    FROZEN.seen.append(1)
    WEAK[SLOTTED_KEY] = 1


class Key:
    """Can be referred to weakly."""


SLOTTED_KEY = Key()


@functools.lru_cache(maxsize=1)
def _cached(_y: int) -> int:
    AUX.append(torch.ones(1))
    return 1


def _drawn(_model: Base, _y: Tensor) -> None:
    RNG.random()
    NUMPY_RNG.random()
    torch.rand(1, generator=TORCH_RNG)


def _hook(model: Base, _y: Tensor) -> None:
    model.layer.weight.register_hook(lambda g: AUX.append(g))
    model.layer.bias.register_post_accumulate_grad_hook(lambda p: AUX.append(p))


def _hooks(model: Base) -> int:
    parameters = (model.layer.weight, model.layer.bias)
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(p, name) or ()) for p in parameters for name in names)


Look = Callable[[Base], Any]

TRACES: dict[str, tuple[Callable[..., Any], Look]] = {
    "a list": (lambda _, y: AUX.append(y), lambda _: len(AUX)),
    "a dict": (lambda _, y: BY_NAME.update(a=y), lambda _: dict(BY_NAME)),
    "a global": (_global, lambda _: COUNTER),
    "a new global": (_new_global, lambda _: "NEW_ONE" in globals()),
    "a class": (_class, lambda _: (Base.calls, hasattr(Base, "added"))),
    "a closure": (_COUNTING, lambda _: _COUNTING(None, None)),
    "a function": (_of_function, lambda _: _of_function.calls),  # type: ignore[attr-defined]
    "a default": (_default, lambda _: len(_default.__defaults__[0])),  # type: ignore[index]
    "slots": (_slotted, lambda _: (SLOTTED.count, len(SLOTTED.seen))),
    "a namespace": (_named, lambda _: (NAMES.last, len(NAMES.seen))),
    "a module": (_module, lambda _: (STATE.calls, len(STATE.seen))),
    "an object": (
        _tracked,
        lambda _: (len(TRACKER.losses), TRACKER.inner, Tracker.total, len(Tracker.names),
                   hasattr(TRACKER, "note")),
    ),
    "an operator": (_added, lambda _: len(TRACKER.losses)),
    "a name in a string": (_by_string, lambda _: TRACKER.inner),
    "a partial": (functools.partial(_default, seen=AUX), lambda _: len(AUX)),
    "a cached function": (lambda _, y: _cached(y.shape[0]), lambda _: len(AUX)),
    "a dict that makes": (
        lambda _, y: MAKING.__setitem__("b", y),
        lambda _: (len(MAKING), Making.made),
    ),
    "an array": (lambda _, y: COUNTS.__setitem__(0, 7), lambda _: COUNTS.tolist()),
    "thread's own": (lambda _, y: HERE.seen.append(y), lambda _: len(HERE.seen)),
    "generators": (
        _drawn,
        lambda _: (RNG.getstate(), str(NUMPY_RNG.bit_generator.state),
                   TORCH_RNG.get_state().tolist()),
    ),
    "containers": (
        _several,
        lambda _: repr((COUNTED, GROUPS, LAST_SEEN, ORDERED, USER_DICT, SET, FROZEN, len(WEAK))),
    ),
    "the module": (
        lambda model, y: (model.kept.append(y), setattr(model, "last", y)),
        lambda model: (len(model.kept), hasattr(model, "last")),
    ),
    "gradient hooks": (_hook, _hooks),
}  # fmt: skip

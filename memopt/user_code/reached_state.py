"""Finds what a user's functions can reach and change, and restores its state.

Reached are a model's modules, what lists and dicts hold, and what the code of its forward, of its
hooks and of the loss names: globals, variables of closures, attributes of objects, classes and
imported modules. An attribute that none of this code names is left alone: it may belong to a
running thread, such as a data loader's. Objects of Python's, torch's and numpy's own classes are
left alone, too.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from queue import Queue
from threading import Thread, local
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

_MOST_OBJECTS = 100_000
"""The most objects that the walk visits; the model itself comes first."""
_LEFT_ALONE = frozenset({"torch", "numpy", "memopt", *sys.stdlib_module_names})
_MAPPINGS: tuple[Any, ...] = (
    collections.OrderedDict,
    dict,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
_SETS: tuple[Any, ...] = (set, weakref.WeakSet)
_SEQUENCES: tuple[Any, ...] = (list, deque, *_SETS)
_OPEN = (collections.UserDict, collections.UserList, types.SimpleNamespace, local)
"""Classes of Python whose objects hold a user's state."""
_OPERATORS = {name for name in vars(operator) if name.startswith("__")} | {
    *("__call__", "__enter__", "__exit__", "__iter__", "__next__", "__len__", "__bool__"),
    *("__getattr__", "__getattribute__", "__setattr__", "__get__", "__set__", "__delete__"),
    *("__radd__", "__rsub__", "__rmul__"),
}
"""Methods that are called without being named."""
_RUNNING = (Thread, Queue, logging.Logger, io.IOBase, DataLoader)
"""Classes whose objects other threads or the system use, a user's subclasses included."""
_ABSENT = object()
_CACHED = type(functools.lru_cache(_ABSENT.__eq__))
_CODE = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    _CACHED,
)
_OF_TORCH = (torch.Tensor, torch.Generator)


class ReachedState:
    """Everything that can be reached from a user's objects, and its recorded state.

    Args:
        roots: the user's objects; those that are no modules have all their attributes recorded.

    Attributes:
        tensors: the tensors reached.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._random: list[tuple[Any, Any]] = []
        self._dicts: list[tuple[Any, dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._variables: list[tuple[Any, Mapping[str, Any], set[str]]] = []
        self._named = {"forward", "__call__"}
        self._kept_alive: dict[int, Any] = {}
        waiting = deque(roots)
        self._roots = set(map(id, waiting))
        while waiting and len(self._kept_alive) < _MOST_OBJECTS:
            one = waiting.popleft()
            if id(one) not in self._kept_alive and _answers(one):
                self._kept_alive[id(one)] = one
                waiting.extend(self._look_at(one))
            if not waiting:
                waiting.extend(self._newly_named())

    def _look_at(self, one: Any) -> Iterable[Any]:
        """Record an object's state; return what it holds."""
        match one:
            case torch.Tensor():
                self.tensors.append(one)
            case torch.Generator():
                self._random.append((one.set_state, one.get_state()))
            case random.Random() if not isinstance(one, random.SystemRandom):
                self._random.append((one.setstate, one.getstate()))
            case _ if isinstance(one, _MAPPINGS):
                # Call the base's methods: a subclass's may import, or make, what it holds.
                held = dict(list(_base(one, _MAPPINGS).items(one)))
                self._dicts.append((one, held))
                return [*held.values(), *self._attributes(one)]
            case _ if isinstance(one, _SEQUENCES):
                items = list(_base(one, _SEQUENCES).__iter__(one))
                self._sequences.append((one, items))
                return [*items, *self._attributes(one)]
            case tuple():
                return one
            case ContextVar():
                return (one.get(None),)
            case functools.partial():
                return (one.func, one.args, one.keywords)
            case types.MethodType():
                if type(one.__self__).__module__.partition(".")[0] != "memopt":
                    self._roots.add(id(one.__self__))
                return (one.__self__, one.__func__)
            case types.FunctionType() if str(one.__module__).startswith("memopt."):
                return ()  # memopt's own state
            case types.FunctionType():
                return self._look_at_function(one)
            case nn.Module():
                return (one.__dict__, type(one))
            case type() | types.ModuleType():
                if not _left_alone(one):
                    self._variables.append((one, dict(vars(one)), set()))
                # Modules may answer any name, as torch.classes does.
                return one.__mro__ if isinstance(one, type) else ()
            case _ if isinstance(one, _RUNNING) or self._is_numpy(one):
                return ()
            case _:
                return self._attributes(one)
        return ()

    def _look_at_function(self, one: Any) -> Iterable[Any]:
        """Return a function's closure, defaults and attributes; record globals its code may
        name."""
        found = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        for cell in one.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            found.append(content)
        if str(one.__globals__.get("__name__")).partition(".")[0] not in _LEFT_ALONE:
            names = _names(one.__code__)
            self._named |= names
            found += [one.__dict__]
            if id(one.__globals__) not in self._kept_alive:
                self._kept_alive[id(one.__globals__)] = one.__globals__
                self._variables.append((one.__globals__, dict(one.__globals__), set()))
        elif one.__dict__:
            found.append(one.__dict__.get("__wrapped__"))
        return found

    def _is_numpy(self, one: Any) -> bool:
        """Record a numpy array or generator; return whether the object is one."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        if isinstance(one, numpy.ndarray):
            if one.flags.writeable and not one.dtype.hasobject:
                self._arrays.append((one, one.copy()))
        elif isinstance(one, numpy.random.RandomState):
            self._random.append((one.set_state, one.get_state()))
        elif isinstance(one, numpy.random.Generator):
            bits = one.bit_generator
            self._random.append((functools.partial(setattr, bits, "state"), bits.state))
        else:
            return False
        return True

    def _attributes(self, one: Any) -> Iterable[Any]:
        """Record an object's attributes; return those to visit now."""
        kind = type(one)
        state = _stored(one, "__dict__", None)
        if _left_alone(kind) and not isinstance(one, _OPEN) and id(one) not in self._roots:
            return [v for v in (state or {}).values() if issubclass(type(v), torch.Tensor)]
        found: list[Any] = [kind]
        if isinstance(state, dict):
            if id(one) in self._roots or isinstance(one, _OPEN):
                # A root, such as a loss that is an object: all its attributes.
                return [*found, state]
            self._variables.append((state, dict(state), set()))
            found += [v for v in state.values() if issubclass(type(v), _OF_TORCH)]
        slots = _slots(kind)
        if slots:
            values = {name: _stored(one, name) for name in slots}
            self._variables.append((one, values, set()))
        return found

    def _newly_named(self) -> Iterator[Any]:
        """Yield values that code found so far names and that have not been visited yet."""
        for owner, before, walked in self._variables:
            names = self._named & before.keys()
            if isinstance(owner, type):
                names |= _OPERATORS & before.keys()
            for name in names - walked:
                walked.add(name)
                value = before[name]
                if issubclass(type(value), _CODE):  # a proxy may refuse `isinstance`
                    yield from _functions(value)
                elif name in self._named:
                    yield value

    def restore(self) -> None:
        """Restore the objects that have changed."""
        for now, before in self._dicts:
            base = _base(now, _MAPPINGS)
            if not _same_items(base.items(now), before.items()):
                base.clear(now)
                for key, value in before.items():
                    base.__setitem__(now, key, value)
        for one, old in self._sequences:
            base = _base(one, _SEQUENCES)
            items = list(base.__iter__(one))
            if [*map(id, items)] != [*map(id, old)]:
                base.clear(one)
                (base.update if base in _SETS else base.extend)(one, old)
        for cell, content in self._cells:
            if _content(cell) is not content:
                _set_content(cell, content)
        for owner, variables, _ in self._variables:
            self._restore_variables(owner, variables)
        for array, values in self._arrays:
            array[...] = values
        for set_state, state in self._random:
            set_state(state)

    def _restore_variables(self, owner: Any, before: Mapping[str, Any]) -> None:
        """Restore an object's named attributes, or a module's named globals."""
        if _is_namespace(owner):
            now: Mapping[str, Any] = dict(owner)
        elif isinstance(owner, (type, types.ModuleType)):
            now = dict(vars(owner))
        else:
            now = {name: _stored(owner, name) for name in before}
        for name in (now.keys() | before.keys()) & self._named:
            old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
            # A module that the forward has imported stays: it is not imported again.
            if new is not old and not (old is _ABSENT and isinstance(new, types.ModuleType)):
                _assign(owner, name, old)


def _stored(one: Any, name: str, otherwise: Any = _ABSENT) -> Any:
    """Return an attribute without calling the object's own `__getattr__`, which may fail for any
    name."""
    kind: Any = type(one)
    try:
        return kind.__getattribute__(one, name)  # a `threading.local` has its own
    except AttributeError:
        return otherwise


def _answers(one: Any) -> bool:
    """Return whether an object tells its class. (A proxy of an object that is gone does not.)"""
    try:
        return one.__class__ is not None
    except Exception:  # noqa: BLE001 (whatever a proxy raises)
        return False


def _base(one: Any, kinds: tuple[Any, ...]) -> Any:
    """Return the first of these classes that an object is an instance of."""
    return next(kind for kind in kinds if isinstance(one, kind))


def _same_items(now: Iterable[tuple[Any, Any]], before: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether items are the same objects, in the same order."""
    return [(id(k), id(v)) for k, v in now] == [(id(k), id(v)) for k, v in before]


def _left_alone(one: Any) -> bool:
    """Return whether a class or a module is Python's, torch's, numpy's or memopt's."""
    name = one.__name__ if isinstance(one, types.ModuleType) else one.__module__
    return str(name).partition(".")[0] in _LEFT_ALONE


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, including functions defined in it."""
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)  # perhaps an argument of getattr or setattr
    return frozenset(found)


def _functions(value: Any) -> Iterator[Any]:
    """Yield the functions behind an attribute of a class."""
    if isinstance(value, property):
        yield from (one for one in (value.fget, value.fset, value.fdel) if one is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, _CACHED):
        yield value.__wrapped__
    else:
        yield getattr(value, "__func__", value)


def _slots(kind: type) -> list[str]:
    """Return the attributes of a class written in Python that are in no `__dict__`. A property of
    a subclass may hide one of them; those of other classes may be read-only."""
    return [
        name
        for one in kind.__mro__
        if "__slots__" in vars(one)
        for name, value in vars(one).items()
        if isinstance(value, types.MemberDescriptorType) and not _left_alone(one)
        if next(vars(k)[name] for k in kind.__mro__ if name in vars(k)) is value
    ]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty until its function has run
        return _ABSENT


def _set_content(cell: types.CellType, content: Any) -> None:
    if content is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _is_namespace(owner: Any) -> bool:
    """Return whether an object is a `__dict__` or a module's globals, no dict with slots."""
    return isinstance(owner, dict) and not _slots(type(owner))


def _assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute or a namespace's entry; the value `_ABSENT` deletes it."""
    if _is_namespace(owner):
        if value is _ABSENT:
            del owner[name]
        else:
            owner[name] = value
    elif isinstance(owner, (type, types.ModuleType)):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _ABSENT:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)  # works for a frozen dataclass, too

"""Finds names that a model's backward reads, whose values may change after its forward.

The backward of a custom autograd function, and a hook that the forward sets on a tensor, are Python
functions. Eager reads their attributes and globals when the backward runs; a traced backward has
the values of the forward. The names that they may read are taken from their code.
"""

from __future__ import annotations

import dis
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memopt.step.reader import Dependency
from memopt.torch_private.access import FILES_OF_TORCH
from memopt.torch_private.modules import modules_of

_SETS_HOOKS = "register_hook"
_COMPUTES_NAMES = ("getattr", "attrgetter", "vars", "__dict__")
_PLAIN = (bool, int, float, complex, str, tuple, type(None))


def late_names(model: nn.Module, traced: Iterable[types.CodeType]) -> frozenset[str] | None:
    """Return the names that the traced backwards may read; None: any."""
    code = [one for one in traced if not one.co_filename.startswith(FILES_OF_TORCH)]
    modules = {name for module in model.modules() for name in modules_of(module)}
    if any(_SETS_HOOKS in one.co_names for one in code):
        return None
    backwards = {one for one in _backwards(torch.autograd.Function) if one in code}
    waiting = list(backwards)
    reached: set[types.CodeType] = set()
    names: set[str] = set()
    while waiting:
        one = waiting.pop()
        if one in reached:
            continue
        reached.add(one)
        read = _read_by(one)
        if one in backwards:
            read -= _kept_by_forward(one)
        if not read.isdisjoint(_COMPUTES_NAMES):
            return None
        names |= read
        # Functions that it calls, and properties that it reads, were traced, too.
        called = read if read.isdisjoint(modules) else {*read, "forward"}
        waiting += [other for other in code if other.co_name in called]
        waiting += [other for other in one.co_consts if isinstance(other, types.CodeType)]
    return frozenset(names)


def is_late(dependency: Dependency, names: frozenset[str] | None) -> bool:
    """Return whether a backward that may read these names may read the value of a dependency."""
    if names is not None:
        return last_name(dependency.shown) in names
    value = dependency.look == dependency.source and isinstance(dependency.planned, _PLAIN)
    return value or not dependency.shared


def last_name(shown: str) -> str:
    """Return the last name in an expression."""
    return next(reversed(re.findall(r"[A-Za-z_]\w*", shown)), "")


def _backwards(function: type) -> Iterator[types.CodeType]:
    """Yield the code of the backward of every autograd function that is derived from this one."""
    subclasses: list[type] = function.__subclasses__()
    for one in subclasses:
        yield from _backwards(one)
        for name in ("backward", "vjp"):
            made = getattr(one.__dict__.get(name), "__func__", None)
            code = getattr(inspect.unwrap(made) if made is not None else None, "__code__", None)
            if isinstance(code, types.CodeType):
                yield code


def _read_by(code: types.CodeType) -> set[str]:
    """Return the names of attributes, globals, closure variables and keys in a function's code."""
    keys = (key for key in code.co_consts if isinstance(key, str))
    return {*code.co_names, *code.co_freevars, *keys}


def _kept_by_forward(code: types.CodeType) -> set[str]:
    """Return the names that a backward reads from its context only, where its forward put them."""
    kept: set[str] = set()
    others: set[str] = set()
    before: Any = None
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"):
            # Newer versions of Python load two variables at once.
            loaded = before[-1] if isinstance(before, tuple) else before
            of_context = one.opname != "LOAD_GLOBAL" and loaded == code.co_varnames[0]
            (kept if of_context else others).add(one.argval)
        before = one.argval if one.opname.startswith("LOAD_FAST") else None
    return kept - others

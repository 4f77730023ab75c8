"""Takes custom autograd functions whose code Dynamo cannot trace into the graph as they are."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from memopt.torch_private.dynamo import taken_whole
from memopt.user_code.opaque import Function
from memopt.user_code.opaque_operators import call_of, called

_opaque: weakref.WeakSet[Function] = weakref.WeakSet()
_SIDE_EFFECT = "Unsafe side effect"


def declare_opaque(function: Function) -> None:
    """Take a custom function's calls into graphs as they are, from now on."""
    _opaque.add(function)


def untraceable(error: Exception) -> Function | None:
    """Return the custom function in whose code Dynamo gave up; None: in no such code, or the code
    changes an object outside of it, which planning would change, too."""
    if _SIDE_EFFECT in str(error):
        return None
    frames = getattr(error, "real_stack", None) or ()
    functions = list(_subclasses(torch.autograd.Function))
    for frame in frames:
        for function in functions:
            if any(_holds(code, frame) for code in _code_of(function)):
                return function
    return None


@contextlib.contextmanager
def opaque_calls() -> Iterator[Callable[[GraphModule], GraphModule]]:
    """Let Dynamo take the calls of opaque functions into its graph; in this thread they call the
    functions' operators meanwhile.

    Returns:
        A function that makes a graph that was traced keep these calls.
    """
    functions, thread = list(_opaque), threading.get_ident()

    def applied(function: Function, eager: Any, *operands: Any, **named: Any) -> Any:
        here = threading.get_ident() == thread
        return called(function, *operands, **named) if here else eager(*operands, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(taken_whole(functions))
        for function in functions:
            stack.enter_context(
                _replaced(function, partial(applied, function, function.apply))
            )
        yield lambda module: _with_calls(module, functions)


@contextlib.contextmanager
def _replaced(function: Function, apply: Any) -> Iterator[None]:
    own = vars(function).get("apply")
    setattr(function, "apply", staticmethod(apply))
    try:
        yield
    finally:
        if own is None:
            del function.apply
        else:
            setattr(function, "apply", own)


def _with_calls(module: GraphModule, functions: Iterable[Function]) -> GraphModule:
    """Replace Dynamo's closures around opaque functions in a graph."""
    found = {id(function): function for function in functions}
    changed = False
    for node in module.graph.nodes if found else ():
        if node.op != "call_function" or not isinstance(node.target, types.FunctionType):
            continue
        held = [cell.cell_contents for cell in node.target.__closure__ or ()]
        function = next((found[id(one)] for one in held if id(one) in found), None)
        if function is not None:
            node.target, changed = call_of(function), True
    if changed:
        module.recompile()
    return module


def _subclasses(function: Function) -> Iterator[Function]:
    for one in function.__subclasses__():
        yield one
        yield from _subclasses(one)


def _code_of(function: Function) -> Iterator[types.CodeType]:
    """Yield the code of a custom function's methods."""
    for name in ("forward", "backward", "setup_context", "vjp"):
        method = vars(function).get(name)
        code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
        if code is not None:
            yield code


def _holds(code: types.CodeType, frame: Any) -> bool:
    """Return whether a frame's line is one of the code's."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_filename == frame.filename and min(lines) <= frame.lineno <= max(lines)

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

from torch.fx import GraphModule

from memopt.errors import CaptureError, led_to
from memopt.torch_private.dynamo import custom_functions_heard, taken_whole
from memopt.user_code.opaque import Function
from memopt.user_code.opaque_operators import call_of, called

_opaque: weakref.WeakSet[Function] = weakref.WeakSet()
_SIDE_EFFECT = "Unsafe side effect"
_NUMPY = frozenset(("numpy", "from_numpy"))
_FUNCTION = "_memopt_custom_function"
"""The attribute of an exception of Dynamo's that names the custom function which was traced."""


def declare_opaque(function: Function) -> None:
    """Take a custom function's calls into graphs as they are, from now on."""
    _opaque.add(function)


def untraceable(error: Exception) -> Function | None:
    """Return the custom function in whose code Dynamo gave up; None: in no such code, or the code
    changes an object outside of it, which planning would change, too."""
    if _SIDE_EFFECT in str(error):
        return None
    return getattr(error, _FUNCTION, None)


def _failed(function: Function, error: BaseException) -> None:
    if not hasattr(error, _FUNCTION):
        setattr(error, _FUNCTION, function)


def refusal_in(error: BaseException, before: BaseException | None) -> CaptureError | None:
    """Return memopt's own refusal of an opaque function among the causes of Dynamo's error; the
    arguments are those of `led_to`."""
    return next((one for one in led_to(error, before) if isinstance(one, CaptureError)), None)


@contextlib.contextmanager
def opaque_calls() -> Iterator[Callable[[GraphModule], bool]]:
    """Let Dynamo take the calls of opaque functions into its graph; in this thread they call the
    functions' operators meanwhile.

    Returns:
        A function that makes a graph that was traced keep these calls, and returns whether it has
        to be traced again, with more functions opaque.
    """
    functions, thread = list(_opaque), threading.get_ident()

    def applied(function: Function, eager: Any, *operands: Any, **named: Any) -> Any:
        here = threading.get_ident() == thread
        return called(function, *operands, **named) if here else eager(*operands, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(taken_whole(functions))
        traced = stack.enter_context(custom_functions_heard(_failed))
        for function in functions:
            stack.enter_context(_replaced(function, partial(applied, function, function.apply)))

        def finished(module: GraphModule) -> bool:
            _keep_calls(module, functions)
            # Those that compute in numpy: Dynamo's operators of torch for it round otherwise.
            found = [one for one in traced if one not in _opaque and _names_numpy(one)]
            for one in found:
                declare_opaque(one)
            return bool(found)

        yield finished


def _names_numpy(function: Function) -> bool:
    """Return whether a custom function's code names NumPy, or that of functions of its modules that
    it names."""
    names = ("forward", "backward", "setup_context")
    waiting = [inspect.unwrap(getattr(function, name)) for name in names]
    seen: set[Any] = set()
    while waiting:
        method = waiting.pop()
        code = getattr(method, "__code__", None)
        if code is None or code in seen or str(method.__module__).partition(".")[0] == "torch":
            continue
        seen.add(code)
        held = [method.__globals__.get(one) for one in code.co_names]
        if not _NUMPY.isdisjoint(code.co_names) or any(
            isinstance(one, types.ModuleType) and one.__name__.partition(".")[0] == "numpy"
            for one in held
        ):
            return True
        waiting += [one for one in held if isinstance(one, types.FunctionType)]
    return False


@contextlib.contextmanager
def _replaced(function: Function, apply: Any) -> Iterator[None]:
    own = vars(function).get("apply")
    function.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del function.apply
        else:
            function.apply = own  # type: ignore[method-assign]


def _keep_calls(module: GraphModule, functions: Iterable[Function]) -> None:
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

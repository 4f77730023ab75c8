"""Traces calls of `torch.utils.checkpoint` however they are written: a plan decides anew what is
recomputed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import noop_context_fn

from memopt.errors import CaptureError
from memopt.torch_private.access import patched, private
from memopt.torch_private.dynamo import variables
from memopt.torch_private.modes import TorchDispatchMode

_CALL = "torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable._call_function"
_FUNCTIONS = (
    "UserMethodVariable",
    "UserFunctionVariable",
    "NestedUserFunctionVariable",
    "UserDefinedObjectVariable",
)
_REFUSED = (
    "torch.utils.checkpoint is called with the context_fn {name}, {why}: leave the checkpoint out, "
    "since the plan decides what is recomputed"
)
_FROM_THE_FORWARD = "which is made in the forward of values that are known only there"
_OTHER_CONTEXTS = (
    "which does not make the two contexts of create_selective_checkpoint_contexts, and no graph "
    "holds others"
)


@contextlib.contextmanager
def checkpoints_as_called() -> Iterator[None]:
    """Trace every `context_fn` that eager takes (dynamo takes only functions from outside the
    forward), and without `debug`, which checks a recomputation that a plan does not make."""
    call = private(_CALL)
    (user_function,) = variables("UserFunctionVariable")

    @functools.wraps(call)
    def taken(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "debug"}
        if "context_fn" in given:
            function = _function_of(given.pop("context_fn"))
            if function is not noop_context_fn:
                given["context_fn"] = user_function(_checked(function))
        return call(self, tx, args, given)

    with patched(_CALL, taken):
        yield


def _function_of(variable: Any) -> Callable[[], Any]:
    """Return the function that dynamo's variable stands for.

    Raises:
        CaptureError: the function depends on what only the forward knows.
    """
    method, function, nested, other = variables(*_FUNCTIONS)
    found: Any
    try:
        if isinstance(variable, method):
            owner = getattr(variable.obj, "value", None)
            found = None if owner is None else variable.fn.__get__(owner)
        elif isinstance(variable, function):
            found = variable.fn
        elif isinstance(variable, nested):
            found = variable.get_function()
        elif isinstance(variable, other):
            found = variable.value
        else:
            found = variable.guard_as_python_constant()
    except NotImplementedError:
        found = None
    if found is None:
        named = getattr(variable, "get_code", None)
        name = named().co_qualname if named else str(variable)
        raise CaptureError(_REFUSED.format(name=name, why=_FROM_THE_FORWARD))
    made: Callable[[], Any] = found
    return made


def _checked(function: Callable[[], Any]) -> Callable[[], Any]:
    """Make the function refuse contexts that torch would not trace."""

    def made() -> Any:
        contexts = function()
        if not all(isinstance(one, TorchDispatchMode) for one in contexts):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise CaptureError(_REFUSED.format(name=name, why=_OTHER_CONTEXTS))
        return contexts

    return made

"""Traces calls of `torch.utils.checkpoint` however they are written: a plan decides anew what is
recomputed."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memopt.errors import CaptureError
from memopt.step.nodes import CHECKPOINTED, REENTRANT, is_reentrant
from memopt.torch_private.access import known, patched, private
from memopt.torch_private.dynamo import variables
from memopt.torch_private.modes import TorchDispatchMode

_CALL = "torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable._call_function"
_UNDONE = "torch._dynamo.side_effects.SideEffects.defer_side_effect_checks"
_SCOPE = "torch._dynamo.current_scope_id.enter_new_scope"
_OWN = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}
"""Arguments of `checkpoint` that the function does not get."""
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


@contextmanager
def checkpoints_as_called(written_out: bool) -> Iterator[None]:
    """Trace every `context_fn` that eager takes (dynamo takes only functions from outside the
    forward), and without `debug`, which checks a recomputation that a plan does not make.

    Args:
        written_out: whether to trace what they call into the graph, as is needed where it looks at
            values.
    """
    call = private(_CALL)
    (user_function,) = variables("UserFunctionVariable")

    @functools.wraps(call)
    def taken(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "debug"}
        if "context_fn" in given:
            function = _function_of(given.pop("context_fn"))
            if function is not noop_context_fn:
                given["context_fn"] = user_function(_checked(function))
        reentrant = is_reentrant(
            {key: one.as_python_constant() for key, one in given.items() if key == "use_reentrant"}
        )
        own = {key: one for key, one in given.items() if key not in _OWN}
        if reentrant and torch.is_grad_enabled() and not any(map(_requires_gradient, args)):
            return user_function(_without_graph).call_function(tx, args, own)
        if written_out and tx.output.current_tracer is tx.output.root_tracer:
            if "context_fn" in given:
                given["context_fn"].fn()
            found = _written_out(tx, args, own, reentrant)
        else:
            found = call(self, tx, args, given)
        if not reentrant or found.is_tensor():
            return found
        return user_function(_as_reentrant).call_function(tx, [found], {})

    with patched(_CALL, taken):
        yield


def _requires_gradient(variable: Any) -> bool:
    one = variable.realize()
    return one.is_tensor() and bool(one.as_proxy().node.meta["example_value"].requires_grad)


def _without_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a reentrant checkpoint is given whose arguments require no gradient: its results do
    not either."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _as_reentrant(found: Any) -> Any:
    """Return a reentrant checkpoint's results: tensors have a gradient only by themselves or in the
    outermost tuple."""
    if type(found) is not tuple:
        return _detached(found)
    joined = [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]
    if len(joined) > 1:
        joined = list(_together(*joined))
    results = []
    for one in found:
        if isinstance(one, torch.Tensor):
            results.append(joined.pop(0) if one.requires_grad else one)
        else:
            results.append(_detached(one))
    return tuple(results)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _together(*results: torch.Tensor) -> Any:
    return _ReentrantResults.apply(*results)  # type: ignore[no-untyped-call]


class _ReentrantResults(torch.autograd.Function):
    """A reentrant checkpoint's results, whose missing gradients autograd makes zeros: what they
    alone are computed from gets zeros, not None."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results; not as views, which may not be changed in place."""
        return tuple([one.detach() for one in results])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients, of which none is missing."""
        return gradients


def _detached(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.detach()
    if type(found) is dict:
        return {key: _detached(one) for key, one in found.items()}
    return type(found)([_detached(one) for one in found]) if type(found) in (list, tuple) else found


def _written_out(tx: Any, args: Any, kwargs: dict[str, Any], reentrant: bool) -> Any:
    """Trace a checkpoint's function into the graph, in nodes that are marked. Changes of objects
    outside of it are refused as a checkpoint's are."""
    graph = tx.output.graph
    last = next(iter(reversed(graph.nodes)), None)
    undone = private(_UNDONE)(tx.output.side_effects) if known(_UNDONE) else nullcontext()
    with private(_SCOPE)(), undone:
        found = args[0].call_function(tx, args[1:], kwargs)
    for node in itertools.takewhile(lambda one: one is not last, reversed(graph.nodes)):
        node.meta[CHECKPOINTED] = REENTRANT if reentrant else 0
    return found


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

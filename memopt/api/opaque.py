"""memopt.opaque: code that no graph can hold, run in planned steps as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F) -> F:
    """Let planned steps run a function's own code instead of tracing it: kernels launched by hand,
    host code, sizes that depend on data inside it. It becomes one operator in the forward and one
    in the backward; its memory and time are measured on the example's values, and it is never run
    again within a step.

    Custom autograd functions that cannot be traced are treated so by themselves; the plan's notes
    name them.

    Args:
        function: a `torch.autograd.Function`, or a function of tensors and constants whose results
            are tensors with the same shapes in every step. Its backward runs it once more,
            recorded by autograd, so that what is inside it is not kept in between, and so does a
            call that goes otherwise than planned: let it draw nothing, and change nothing outside.
            What it differentiates must be among its arguments, tensors by themselves.

    Returns:
        The same class; of a function one that is to be called in its place. Also a decorator.

    Raises:
        ValueError: it is neither.
        ExecutionError: (from a step) it draws random numbers, reads parameters that are not among
            its arguments, or did otherwise than when it was planned.
    """
    import torch

    from memopt.capture.opaque_calls import declare_opaque
    from memopt.torch_private.dynamo import captured_around
    from memopt.user_code.opaque_function import as_autograd_function

    if isinstance(function, type):
        if not issubclass(function, torch.autograd.Function):
            raise ValueError(
                f"opaque takes a torch.autograd.Function or a function, got class {function}"
            )
        declare_opaque(function)
        return function
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise ValueError(
            f"opaque takes a torch.autograd.Function or a function, got {type(function).__name__}; "
            "of a module give a function that takes its parameters as arguments"
        )
    made = as_autograd_function(function)
    declare_opaque(made)

    # Without its attributes: torch.compiler.disable's would keep the call out of every graph.
    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        if captured_around():
            values = (*args, *kwargs.values())
            return made.apply(tuple(kwargs), *values)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]

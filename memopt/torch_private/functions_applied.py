"""Functions whose calls a trace takes into its graph as custom autograd functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from memopt.torch_private.dynamo import (
    constant,
    handlers_replaced,
    taken_whole,
    variables,
)


@contextlib.contextmanager
def functions_applied(
    applied: Mapping[Callable[..., Any], type[torch.autograd.Function]],
) -> Iterator[None]:
    """Trace inside with calls of functions as applications of custom functions, which get the
    names of keyword arguments, then all arguments."""
    several, custom = variables("TupleVariable", "misc.AutogradFunctionVariable")

    def call(function: Any, _own: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        names = several([constant(one) for one in kwargs])
        operands = [names, *args, *kwargs.values()]
        return custom(function).call_method(translator, "apply", operands, {})

    handled = {one: partial(call, function) for one, function in applied.items()}
    with taken_whole(applied), handlers_replaced(handled):
        yield

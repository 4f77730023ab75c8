"""Backwards that eager decides by the data, as one operator of the captured graph.

The gradient of a product is a quotient where no factor is 0, else it is made of cumulative
products; eager looks at the data, a trace cannot, and takes the second way always: other last bits.
These calls are traced with a backward that asks eager's own autograd when the step runs: it repeats
the forward and hands back the gradient.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memopt.profiler.as_eager.operators import Substitute, define
from memopt.profiler.torch_private import autograd_in_kernels

_FUNCTIONS: dict[str, Any] = {"prod": torch.prod, "cumprod": torch.cumprod}
"""Functions of one tensor whose backward looks at its values."""

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Of a tensor: shape, strides, dtype, device."""


@functools.cache
def operator() -> Any:
    """`memopt::eager_backward(function, arguments, gradient, given)`: the gradient of `given`."""
    return define(
        "eager_backward(str function, str arguments, Tensor gradient, Tensor given) -> Tensor",
        _backward,
        _described,
    )


def _backward(function: str, arguments: str, gradient: Tensor, given: Tensor) -> Tensor:
    found = _gradient(function, arguments, gradient, given)
    if found.data_ptr() == gradient.data_ptr():
        # A gradient that is expanded or handed on would be a view of what another tensor holds.
        return found.clone()
    strides = _strides(function, arguments, _layout(gradient), _layout(given))
    if found.stride() == strides:
        return found
    return torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(
        found
    )


def _gradient(function: str, arguments: str, gradient: Tensor, given: Tensor) -> Tensor:
    """As eager's autograd makes it, in the memory layout that it has there."""
    args, kwargs = json.loads(arguments)
    # Below a dispatch mode autograd is switched off, not only gradients.
    with autograd_in_kernels(), torch.enable_grad():
        leaf = given.detach().requires_grad_()
        result = _FUNCTIONS[function](leaf, *args, **kwargs)
    (found,) = torch.autograd.grad(result, leaf, gradient)
    return found


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@functools.lru_cache(maxsize=4096)
def _strides(function: str, arguments: str, gradient: _Layout, given: _Layout) -> tuple[int, ...]:
    """The result's strides where no factor is 0, for every call: what reads it is traced once.
    First asked while tracing, when no memory is counted."""
    gradient_, given_ = (
        torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)
        for shape, strides, dtype, device in (gradient, given)
    )
    return _gradient(function, arguments, gradient_, given_).stride()


def is_eager_backward(target: Any) -> bool:
    """Whether a call's target is the operator."""
    return operator.cache_info().currsize > 0 and target is operator()


def dearest_values(arguments: tuple[Any, ...]) -> None:
    """Change the operator's stand-in arguments to those for which it needs most time and memory:
    where a factor is 0, eager takes the longer way."""
    given = arguments[3]
    if given.numel():
        given[(0,) * given.dim()] = 0


def _described(function: str, arguments: str, gradient: Tensor, given: Tensor) -> Tensor:
    return torch.empty_like(given)


class _AsEager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, function: str, arguments: str) -> Tensor:
        ctx.save_for_backward(given)
        ctx.call = (function, arguments)
        args, kwargs = json.loads(arguments)
        result: Tensor = _FUNCTIONS[function](given, *args, **kwargs)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (given,) = ctx.saved_tensors
        return operator()(*ctx.call, gradients[0], given), None, None


def _with_eager_backward(
    function: Callable[..., Tensor], given: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Call one of `_FUNCTIONS` with eager's backward."""
    arguments = json.dumps((args, kwargs))
    result: Tensor = _AsEager.apply(given, function.__name__, arguments)  # type: ignore[no-untyped-call]
    return result


def backwards_as_eager(traced: GraphModule) -> None:
    """Give a dynamo graph's calls whose backward looks at the data eager's backward."""
    found = [node for node in traced.graph.nodes if _looks(node)]
    for node in found:
        node.target = Substitute(_FUNCTIONS[_name(node)], _with_eager_backward)
        node.op = "call_function"
    if found:
        operator()
        traced.recompile()


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _looks(node: Node) -> bool:
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or _name(node) not in _FUNCTIONS:
        return False
    plain = all(type(a) in (int, bool) for a in (*node.args[1:], *node.kwargs.values()))
    return plain and isinstance(value, Tensor) and value.requires_grad

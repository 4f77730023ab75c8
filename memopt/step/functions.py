"""Replaces functions in dynamo's graph that eager computes differently from a trace.

The gradient of a product is a quotient if no factor is 0, else it consists of cumulative products.
Eager looks at the data; a trace cannot, and always takes the second way, with other last bits.
These calls are traced with a backward that asks eager's own autograd when the step runs: it repeats
the forward and returns the gradient.

`linalg.svdvals` and its kin (norms by singular values, condition numbers, ranks) also ask LAPACK
for the vectors, but only if a backward will need them; for values alone LAPACK takes another path,
with other last bits. A traced tensor always looks as if it had a backward.

`torch.bilinear` and `torch.linalg.pinv` are one node each, made of products inside. Autocast rounds
these products in eager, but a graph's nodes run without autocast. Under autocast they are traced as
memopt's operators, which switch it on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memopt.step.operators import CallsThrough, Substitute, define
from memopt.torch_private import pytree
from memopt.torch_private.modes import autograd_in_kernels
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.operators import schema_of

_FUNCTIONS: dict[str, Any] = {"prod": torch.prod, "cumprod": torch.cumprod}
"""Functions of one tensor whose backward looks at the tensor's values."""

_VECTORS: dict[Any, tuple[int, str]] = {
    _ATEN._linalg_svd.default: (2, "compute_uv"),
    _ATEN._linalg_eigh.default: (2, "compute_v"),
}
"""Factorisation → position and name of the argument that asks for vectors."""

_COMPOSED = frozenset(
    {
        "linalg_svdvals",
        "linalg_eigvalsh",
        "linalg_cond",
        "linalg_matrix_norm",
        "linalg_matrix_rank",
        "linalg_norm",
        "norm",
    }
)
"""Names of functions that ask for vectors if there is a backward."""

_ROUNDED_INSIDE: dict[str, Any] = {
    "bilinear": _ATEN._trilinear.default,
    "linalg_pinv": _ATEN.linalg_pinv.atol_rtol_tensor,
}
"""Function → its inner operator that has no autocast rule, while the operator's parts have one."""

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""


def _backward(function: str, arguments: str, gradient: Tensor, given: Tensor) -> Tensor:
    found = _gradient(function, arguments, gradient, given)
    if found.data_ptr() == gradient.data_ptr():
        # An expanded or passed-on gradient would be a view of another tensor's memory.
        return found.clone()
    strides = _strides(function, arguments, _layout(gradient), _layout(given))
    if found.stride() == strides:
        return found
    return found.new_empty_strided(found.shape, strides).copy_(found)


def _gradient(function: str, arguments: str, gradient: Tensor, given: Tensor) -> Tensor:
    """Compute the gradient as eager's autograd does, in the memory layout that it has there."""
    args, kwargs, rounded = json.loads(arguments)
    kind = given.device.type
    dtype = None if rounded is None else getattr(torch, rounded)
    autocast = torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False)
    # Below a dispatch mode autograd is switched off, not only gradients.
    with autograd_in_kernels(), torch.enable_grad(), autocast:
        leaf = given.detach().requires_grad_()
        result = _FUNCTIONS[function](leaf, *args, **kwargs)
    (found,) = torch.autograd.grad(result, leaf, gradient)
    return found


def _layout(tensor: Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@functools.lru_cache(maxsize=4096)
def _strides(function: str, arguments: str, gradient: _Layout, given: _Layout) -> tuple[int, ...]:
    """Return the result's strides if no factor is 0; every call uses them, since the readers are
    traced for one layout. First called while tracing, when no memory is counted."""
    gradient_, given_ = (
        torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)
        for shape, strides, dtype, device in (gradient, given)
    )
    return _gradient(function, arguments, gradient_, given_).stride()


EAGER_BACKWARD = define(
    "eager_backward(str function, str arguments, Tensor gradient, Tensor given) -> Tensor",
    _backward,
    lambda _function, _arguments, _gradient, given: torch.empty_like(given),
)
"""`memopt::eager_backward(function, arguments, gradient, given)`: the gradient of `given`."""


def costliest_values(arguments: tuple[Any, ...]) -> None:
    """Make one factor of a product 0: for that eager's backward needs the most time and memory."""
    given = arguments[3]
    if given.numel():
        given[(0,) * given.dim()] = 0


class _AsEager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, function: str, arguments: str) -> Tensor:
        ctx.save_for_backward(given)
        ctx.call = (function, arguments)
        args, kwargs, _ = json.loads(arguments)
        result: Tensor = _FUNCTIONS[function](given, *args, **kwargs)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (given,) = ctx.saved_tensors
        return EAGER_BACKWARD(*ctx.call, gradients[0], given), None, None


def _with_eager_backward(
    function: Callable[..., Tensor], given: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Call one of `_FUNCTIONS` with eager's backward, which rounds its forward as autocast does
    now."""
    kind = given.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    rounded = None if dtype is None else str(dtype).removeprefix("torch.")
    arguments = json.dumps((args, kwargs, rounded))
    result: Tensor = _AsEager.apply(given, function.__name__, arguments)  # type: ignore[no-untyped-call]
    return result


class _ValuesAlone(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _VECTORS:
            position, name = _VECTORS[func]
            args, kwargs = args[:position], {**kwargs, name: False}
        return func(*args, **kwargs)


def _without_vectors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose factorisations make no vectors."""
    with _ValuesAlone():
        return function(*args, **kwargs)


@functools.cache
def _under_autocast(overload: Any) -> Any:
    """Define memopt's operator that runs another one under autocast; once in a process."""

    def kernel(dtype: torch.dtype, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(given.device.type, dtype, cache_enabled=False):
            return overload(given, *args, **kwargs)

    def described(dtype: torch.dtype, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = overload(given, *args, **kwargs)
        # A pseudo-inverse's result is its last product.
        last = overload is _ROUNDED_INSIDE["linalg_pinv"] and given.numel() > 0
        return result.to(dtype) if last else result

    name, _, arguments = str(schema_of(overload)).removeprefix("aten::").partition("(")
    return define(f"{name}(ScalarType dtype, {arguments}", kernel, described)


class _RoundedInside(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _ROUNDED_INSIDE.values():
            return _under_autocast(func)(self._dtype, *args, **kwargs)
        return func(*args, **kwargs)


def _as_autocast(function: Callable[..., Any], given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call one of `_ROUNDED_INSIDE`; autocast, if it is on, rounds inside it."""
    kind = given.device.type
    if not torch.is_autocast_enabled(kind):
        return function(given, *args, **kwargs)
    with _RoundedInside(torch.get_autocast_dtype(kind)):
        return function(given, *args, **kwargs)


def functions_as_eager(traced: GraphModule) -> None:
    """Let a dynamo graph's calls that eager computes differently run eager's way, also inside
    checkpointed parts."""
    for module in traced.modules():
        if not isinstance(module, GraphModule):
            continue
        nodes = module.graph.nodes
        found = [(node, call) for node in nodes if (call := _eager_call(node)) is not None]
        for node, call in found:
            node.target, node.op = call, "call_function"
        if found:
            module.recompile()


def has_no_second_derivative(node: Node) -> bool:
    """Return whether a dynamo node's backward becomes an operator of memopt's."""
    call = _eager_call(node)
    return call is not None and call.way is _with_eager_backward


def _eager_call(node: Node) -> Substitute | None:
    """Return the call that eager makes in a node's place; None: the node stays as it is."""
    if node.op not in ("call_function", "call_method"):
        return None
    method = node.op == "call_method"
    # A subclass's own method, such as a DTensor's to_local(), is not Tensor's.
    function = getattr(Tensor, str(node.target), None) if method else node.target
    name = getattr(function, "__name__", "")
    if name in _ROUNDED_INSIDE:
        return Substitute(function, _as_autocast)
    results = pytree.tree_leaves(node.meta.get("example_value"))
    has_backward = any(isinstance(one, Tensor) and one.requires_grad for one in results)
    if name in _COMPOSED and not has_backward:
        return Substitute(function, _without_vectors)
    plain = all(type(a) in (int, bool) for a in (*node.args[1:], *node.kwargs.values()))
    if name in _FUNCTIONS and has_backward and plain:
        return Substitute(_FUNCTIONS[name], _with_eager_backward)
    return None

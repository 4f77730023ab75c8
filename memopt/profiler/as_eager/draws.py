"""Random numbers drawn in place (`bernoulli_`, `normal_`...), traced as eager draws them.

A kernel draws in the order in which a tensor's elements lie in memory, and some (`normal_`) draw
other numbers where there are gaps. The functional forms that AOTAutograd traces draw into a
row-major or a gapless copy: other elements get the numbers. A tensor that is not row-major is
therefore drawn by an operator of memopt's own, `memopt::bernoulli` and so on, which makes a tensor
with eager's strides and runs eager's kernel on it.

The backwards of dropout and RReLU are torch's, but torch describes their results with other strides
than its CPU kernels give them. They are traced under a name of memopt's with the right description,
and get their own name back afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from memopt.profiler.as_eager.operators import CallsThrough, define, functional_name
from memopt.profiler.torch_private import is_functional, replace_functional

_ATEN = torch.ops.aten
_IN_PLACE = (
    _ATEN.bernoulli_.float,
    _ATEN.bernoulli_.Tensor,
    _ATEN.uniform_.default,
    _ATEN.normal_.default,
    _ATEN.exponential_.default,
    _ATEN.cauchy_.default,
    _ATEN.geometric_.default,
    _ATEN.log_normal_.default,
    _ATEN.random_.default,
    _ATEN.random_.to,
    getattr(_ATEN.random_, "from"),
)
_LAYOUT = "int[] size, int[] stride, ScalarType dtype, Device device"


def _kernel(overload: Any) -> Callable[..., torch.Tensor]:
    """Eager's kernel on a new tensor; gaps are left out of the result."""

    def draw(
        size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, *args: Any
    ) -> torch.Tensor:
        drawn = torch.empty_strided(size, stride, dtype=dtype, device=device)
        overload(drawn, *args)
        return gapless(drawn)

    return draw


def _described(
    size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, *_: Any
) -> torch.Tensor:
    """What `_kernel` returns, without its values."""
    return gapless(torch.empty_strided(size, stride, dtype=dtype, device=device))


def gapless(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its storage holds nothing but its elements, else a copy that does."""
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size_bytes else tensor.clone()


@functools.cache
def _functional(overload: Any) -> Any:
    """memopt's operator in place of one that draws in place; made once in a process."""
    given = [f"{a.type} {a.name}" for a in _options(overload)]
    schema = f"{functional_name(overload)}({', '.join([_LAYOUT, *given])}) -> Tensor"
    random = (torch.Tag.nondeterministic_seeded,)
    return define(schema, _kernel(overload), _described, random)


def _options(overload: Any) -> list[Any]:
    """The arguments of a draw, after the tensor and without the generator."""
    return [a for a in overload._schema.arguments[1:] if a.name != "generator"]


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, _scale: float) -> torch.Tensor:
    return grad.mul(mask)


def _rrelu_backward(
    grad: torch.Tensor, x: torch.Tensor, noise: torch.Tensor, lower: float, upper: float,
    training: bool, _in_place: bool,
) -> torch.Tensor:  # fmt: skip
    random = training and upper - lower > 1e-6
    return noise.mul(grad) if random else _ATEN.leaky_relu_backward(grad, x, lower, False)


_MISDESCRIBED: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.native_dropout_backward.default: _dropout_backward,
    _ATEN.rrelu_with_noise_backward.default: _rrelu_backward,
}
"""Operator → a computation whose result is laid out as the CPU kernel's is."""


@functools.cache
def _described_rightly(overload: Any) -> Any:
    """An operator that is traced in place of one whose result torch describes wrongly."""
    schema = str(overload._schema).removeprefix("aten::")
    return define(schema, overload, _MISDESCRIBED[overload])


def with_own_names(module: GraphModule) -> None:
    """Give the operators that were traced under another name their own again, in place."""
    own = {_described_rightly(overload): overload for overload in _MISDESCRIBED}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in own:
            node.target = own[node.target]


def row_major(tensor: Any) -> bool:
    """Whether a traced tensor is in eager, and the trace's value of it as well: an update in place
    from before may have given that another layout."""
    return bool(tensor.is_contiguous() and tensor.from_functional().is_contiguous())


class DrawsAsEager(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    """While a model is traced: draws in place into tensors that are not row-major become memopt's
    operators, which give the tensor its new value; backwards of random operators get eager's
    strides (`with_own_names` afterwards)."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _MISDESCRIBED and args[0].device.type == "cpu":
            return _described_rightly(func)(*args, **kwargs)
        if func is _ATEN.rrelu_with_noise.default and args[0].device.type == "cpu":
            # Its functional form keeps the input's layout; eager's result is row-major.
            return func(args[0].contiguous(), *args[1:], **kwargs)
        if func not in _IN_PLACE or not is_functional(args[0]) or row_major(args[0]):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor, *given = args
        for option in _options(func)[len(given) :]:
            given.append(kwargs.get(option.name, option.default_value))
        layout = (list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device)
        replace_functional(tensor, _functional(func)(*layout, *given))
        return tensor

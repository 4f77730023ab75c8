"""Traces draws (`normal_`...) and updates (`masked_fill_`...) in place as eager runs them.

A kernel draws in the order in which a tensor's elements lie in memory, and some (`normal_`) draw
other numbers if there are gaps. The functional forms that AOTAutograd traces draw into a row-major
or a gapless copy: other elements get the numbers. A tensor that is not row-major is therefore drawn
by an operator of memopt's own, `memopt::bernoulli` and so on, which makes a tensor with eager's
strides and runs eager's kernel on it.

The backwards of dropout and RReLU are torch's, but torch describes their results with other strides
than its CPU kernels give them. They are traced under a name of memopt's with the right description,
and get their own name back afterwards.

An update in place keeps a tensor's strides; the functional form of some operators makes a row-major
result from any argument: every later kernel would add in another order than eager's. Such an update
is traced as `memopt::masked_fill` and so on, which copies the tensor with its strides and runs
eager's kernel in place on the copy. The functional form stays where the user calls it: eager's
result is row-major there, too. So is a sum of gradients that autograd makes in place, and out of
place if a tensor is traced, where strides of size 1 tell batch norm's backward which memory layout
it reads (images of one pixel with their channels last).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from memopt.step.memory_layout import fills_storage, same_strides, shares_elements
from memopt.step.operators import CallsThrough, define, functional_name
from memopt.torch_private.aot import as_functional, is_functional, replace_functional
from memopt.torch_private.modes import (
    backward_number,
    node_number,
    only_the_backward_holds,
    running_node,
)
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.torch_private.pytree import tree_map

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
_FILL = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)
"""Updates that give every element the same value."""
_LAYOUT = "int[] size, int[] stride, ScalarType dtype, Device device"


def _drawn(
    draw: Callable[..., Any],
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
    *args: Any,
) -> Tensor:
    """Make a tensor and let `draw` fill it; gaps are left out of the result."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    draw(tensor, *args)
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@functools.cache
def _functional_draw(overload: Any) -> Any:
    """Define memopt's operator that stands for an operator that draws in place; once in a
    process."""
    given = [f"{a.type} {a.name}" for a in _options(overload)]
    schema = f"{functional_name(overload)}({', '.join([_LAYOUT, *given])}) -> Tensor"
    kernel, described = partial(_drawn, overload), partial(_drawn, lambda *_: None)
    return define(schema, kernel, described, (torch.Tag.nondeterministic_seeded,))


def _options(overload: Any) -> list[Any]:
    """Return a draw's arguments after the tensor, without the generator."""
    return [a for a in schema_of(overload).arguments[1:] if a.name != "generator"]


def _dropout_backward(grad: Tensor, mask: Tensor, _scale: float) -> Tensor:
    return grad.mul(mask)


def _rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float,
    training: bool, _in_place: bool,
) -> Tensor:  # fmt: skip
    random = training and upper - lower > 1e-6
    return noise.mul(grad) if random else _ATEN.leaky_relu_backward(grad, x, lower, False)


_MISDESCRIBED: dict[Any, Callable[..., Tensor]] = {
    _ATEN.native_dropout_backward.default: _dropout_backward,
    _ATEN.rrelu_with_noise_backward.default: _rrelu_backward,
}
"""Operator → a function whose result has the layout of the CPU kernel's."""


@functools.cache
def described_rightly() -> dict[Any, Any]:
    """Map operators whose results torch describes wrongly to memopt's, which are traced instead;
    made once in a process."""
    return {
        overload: define(str(schema_of(overload)).removeprefix("aten::"), overload, described)
        for overload, described in _MISDESCRIBED.items()
    }


def with_own_names(module: GraphModule) -> None:
    """Give the operators that were traced under another name their own again, in place."""
    own = {other: overload for overload, other in described_rightly().items()}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in own:
            node.target = own[node.target]


_in_place: dict[Any, Any] = {}
"""memopt's operator → the overload that it runs on a copy of its first argument."""


def in_place_twin(target: Any) -> Any:
    """Return the overload that does in place what an operator of this module does on a copy; None
    for other operators."""
    return _in_place.get(target)


@functools.cache
def written_into(overload: Any) -> Callable[..., Tensor]:
    """Return an in-place overload's operator that writes to a given tensor `out`."""

    def update(given: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        overload(out.copy_(given), *args, **kwargs)
        return out

    # Generated code calls it by this name.
    name, _, form = functional_name(overload).partition(".")
    update.__name__ = f"{name}_{form or 'default'}"
    return update


def _empty_like(given: Tensor, *_: Any, **__: Any) -> Tensor:
    """Make a tensor with the given one's strides, gaps included."""
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)


@functools.cache
def _functional_update(overload: Any) -> Any:
    """Define memopt's operator that stands for an operator that updates a tensor; once in a
    process."""

    def kernel(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return written_into(overload)(given, *args, out=_empty_like(given), **kwargs)

    _, _, arguments = str(schema_of(overload)).replace("(a!)", "").partition("(")
    made = define(f"{functional_name(overload)}({arguments}", kernel, _empty_like)
    _in_place[made] = overload
    return made


@functools.cache
def _updates(func: Any) -> bool:
    """Return whether an operator is an update in place: it writes to its first argument and to
    nothing else, draws no random numbers, and changes neither shape nor strides."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    schema = schema_of(func)
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return (
        schema.name.endswith("_")
        and written[:1] == [True]
        and not any(written[1:])
        and str(schema.arguments[0].type) == "Tensor"
        and torch.Tag.inplace_view not in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _keeps_layout(tensor: Any) -> bool:
    """Return whether a traced tensor is row-major in eager and in the trace, where an earlier
    update in place may have changed the layout; or it is not functional, and so not updated."""
    if not is_functional(tensor):
        return True
    return bool(tensor.is_contiguous() and tensor.from_functional().is_contiguous())


_FILLS_ITS_OWN = frozenset(
    {
        "ClampMaxBackward1",
        "ClampMinBackward1",
        "FmaxBackward0",
        "FminBackward0",
        "MaximumBackward0",
        "MinimumBackward0",
    }
)
"""Autograd's nodes that fill a part of the `where` that they have just made: in place in eager, and
since torch 2.14 on a copy of another layout if a dispatch mode is active."""


class InPlaceAsEager(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    """While a model is traced, replaces by memopt's operators the draws in place into tensors that
    are not row-major, and the updates in place whose functional form would change strides.
    Backwards of random operators get eager's strides (`with_own_names` afterwards)."""

    def __init__(self) -> None:
        super().__init__()
        self._made: tuple[Any, int | None] = None, None
        """The last `where` that a node of `_FILLS_ITS_OWN` made, and the node's number."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ATEN.masked_fill.Scalar:
            made, by = self._made
            if made is args[0] and by is not None and by == _filling_node():
                func = _ATEN.masked_fill_.Scalar
        result = self._as_eager(func, args, kwargs)
        if func is _ATEN.where.self:
            self._made = result, _filling_node()
        return result

    def _as_eager(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _ATEN.add.Tensor and not kwargs and _adds_to_a_gradient(*args):
            result = func(*args)
            if result.stride() == args[0].stride():
                return result
            return _functional_update(_ATEN.add_.Tensor)(*args)
        # The result depends on the kernel; torch refuses what it sees (`expand`, `unfold`).
        changes = (_updates(func) and func not in _FILL) or func in _IN_PLACE
        if changes and shares_elements(args[0]):
            raise RuntimeError(
                f"{func} changes a view of shape {list(args[0].shape)} and strides "
                f"{list(args[0].stride())}, some of whose elements are the same memory: torch "
                "leaves open what that gives. Change a clone of the view, or views without overlap"
            )
        if func in _MISDESCRIBED and args[0].device.type == "cpu":
            return described_rightly()[func](*args, **kwargs)
        if func is _ATEN.rrelu_with_noise.default and args[0].device.type == "cpu":
            # The functional form keeps the input's layout; eager's result is row-major.
            return func(args[0].contiguous(), *args[1:], **kwargs)
        if func in _IN_PLACE and kwargs.get("generator") is None and not _keeps_layout(args[0]):
            return self._drawn(func, args, kwargs)
        if not _updates(func) or _keeps_layout(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        # The arguments before the update, since some may share the tensor's memory.
        before, kept = tree_map(_value_now, (args, kwargs))
        result = func(*args, **kwargs)
        if same_strides(tensor, tensor.from_functional().stride()):
            return result
        replace_functional(tensor, _functional_update(func)(*before, **kept))
        return result

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *given = args
        for option in _options(func)[len(given) :]:
            given.append(kwargs.get(option.name, option.default_value))
        layout = (list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device)
        replace_functional(tensor, _functional_draw(func)(*layout, *given))
        return tensor


def _adds_to_a_gradient(first: Any, second: Any) -> bool:
    """Return whether a sum is of gradients that autograd adds up in place in eager, in a layout
    that can differ from a new tensor's: by the strides of dimensions of size 1 alone."""
    return (
        backward_number() >= 0
        and is_functional(first)
        and is_functional(second)
        and 1 in first.shape
        and first.shape == second.shape
        and first.dtype == second.dtype
        and fills_storage(first)
        and only_the_backward_holds(first)
    )


def _filling_node() -> int | None:
    """Return the sequence number of the autograd node that runs now, if it is of a kind that fills
    a tensor of its own (`_FILLS_ITS_OWN`); else None."""
    node = running_node()
    return node_number(node) if node is not None and node.name() in _FILLS_ITS_OWN else None


def _value_now(value: Any) -> Any:
    return as_functional(value.from_functional()) if is_functional(value) else value

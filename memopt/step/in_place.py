"""Finds kernels that may write their result over one of their arguments, and makes such calls.

These are elementwise kernels, which read each element before they write it, by the same loop in the
same order, and softmax's, which read a row before they write it: the result is the same bit for
bit. Some have a twin that works in place, the others an overload that takes the tensor to write to,
which may be their first argument.
A kernel of memopt's own names its twin in its attribute `over` (`kernels/kernel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from memopt.step.memory_layout import fills_storage, storage_of
from memopt.step.signature import Arguments, signature, values_of
from memopt.step.trial import same_bits
from memopt.step.updates import in_place_twin
from memopt.torch_private.operators import aten as _aten
from memopt.torch_private.pytree import tree_leaves

_OVER_FIRST: dict[Any, Any] = {
    _aten.relu.default: _aten.relu_.default,
    _aten.hardtanh.default: _aten.hardtanh_.default,
    _aten.leaky_relu.default: _aten.leaky_relu_.default,
    _aten.hardswish.default: _aten.hardswish_.default,
    _aten.hardsigmoid.default: _aten.hardsigmoid_.default,
    _aten.sigmoid.default: _aten.sigmoid_.default,
    _aten.tanh.default: _aten.tanh_.default,
    _aten.silu.default: _aten.silu_.default,
    _aten.gelu.default: _aten.gelu_.default,
    _aten.neg.default: _aten.neg_.default,
    _aten.exp.default: _aten.exp_.default,
    _aten.clamp.default: _aten.clamp_.default,
    _aten.clamp_min.default: _aten.clamp_min_.default,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.sub.Scalar: _aten.sub_.Scalar,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    # In half precision mul_.Scalar rounds the number first; mul.Scalar does not.
    _aten.mul.Scalar: _aten.mul_.Tensor,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.div.Scalar: _aten.div_.Scalar,
}
"""Kernel → its twin that overwrites its first argument."""

_COMMUTE = frozenset({_aten.add.Tensor, _aten.mul.Tensor})
"""Kernels whose second argument may be overwritten as well, without a scaling (`alpha`)."""

_INTO: dict[Any, tuple[Any, str]] = {
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, "grad_input"),
    _aten.hardtanh_backward.default: (_aten.hardtanh_backward.grad_input, "grad_input"),
    _aten.leaky_relu_backward.default: (_aten.leaky_relu_backward.grad_input, "grad_input"),
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
    _aten.silu_backward.default: (_aten.silu_backward.grad_input, "grad_input"),
    _aten.gelu_backward.default: (_aten.gelu_backward.grad_input, "grad_input"),
    _aten._softmax.default: (_aten._softmax.out, "out"),
    _aten._log_softmax.default: (_aten._log_softmax.out, "out"),
    _aten._softmax_backward_data.default: (_aten._softmax_backward_data.out, "grad_input"),
    _aten._log_softmax_backward_data.default: (_aten._log_softmax_backward_data.out, "out"),
}
"""Kernel → its overload that writes into a given tensor, here its first argument."""


def _over_first(target: Any) -> Any:
    """Return a kernel's twin that overwrites its first argument; None if it has none."""
    return _OVER_FIRST.get(target) or in_place_twin(target)


def overwritable(node: Node) -> tuple[Node, ...]:
    """Return the arguments that a kernel call may overwrite, by its kind and the shapes.

    Each has the shape, dtype and strides of the result, has a storage of its own without gaps, as
    the result does, and occurs in the call once.
    """
    result = node.meta.get("val")
    over = getattr(node.target, "over", None)
    if over is not None and isinstance(result, tuple):
        result = result[0]
    if not isinstance(result, torch.Tensor) or not _whole(result):
        return ()
    first = over or node.target in _INTO or _over_first(node.target) is not None
    positions = [0] if first else []
    if node.target in _COMMUTE and not node.kwargs:
        positions.append(1)
    found = []
    for position in positions:
        argument = node.args[position]
        beside = (*node.args[:position], *node.args[position + 1 :], *node.kwargs.values())
        others = [a for a in tree_leaves(beside) if isinstance(a, Node)]
        if isinstance(argument, Node) and _alike(argument.meta.get("val"), result):
            storage = storage_of(argument.meta["val"])
            values = [other.meta.get("val") for other in others]
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            if all(storage_of(value) != storage for value in tensors):
                found.append(argument)
    return tuple(found)


def in_place_call(
    node: Node, taken: Node
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call that writes a node's result over an argument: target, args, kwargs."""
    over = getattr(node.target, "over", None)
    if over is not None:
        return over, tuple(node.args), dict(node.kwargs)
    if node.target in _INTO:
        target, name = _INTO[node.target]
        return target, tuple(node.args), {**node.kwargs, name: taken}
    args = tuple(node.args)
    if taken is not args[0]:
        args = (args[1], args[0])
    target = _over_first(node.target)
    assert target is not None
    return target, args, dict(node.kwargs)


def same_bits_in_place(node: Node, taken: Node, device: torch.device) -> bool:
    """Return whether the call that writes over an argument gives the kernel's bits, tried on
    stand-in data; see `memopt.step.trial`."""
    target, args, kwargs = in_place_call(node, taken)
    position = next(i for i, argument in enumerate(node.args) if argument is taken)

    def over(arguments: Arguments) -> Any:
        pairs = zip(node.args, arguments[0], strict=True)
        given = {argument: value for argument, value in pairs if isinstance(argument, Node)}
        changed = [given.get(value, value) if isinstance(value, Node) else value for value in args]
        options = {**arguments[1], **{k: given[taken] for k, v in kwargs.items() if v is taken}}
        results = target(*changed, **options)
        first = results[0] if isinstance(results, (tuple, list)) else results
        assert first.data_ptr() == arguments[0][position].data_ptr()
        return results

    return same_bits(signature(node), values_of(node), device, (target, position), over)


def _whole(value: torch.Tensor) -> bool:
    return value.numel() > 0 and not value.is_complex() and fills_storage(value)


def _alike(value: Any, result: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == result.shape
        and value.dtype == result.dtype
        and value.stride() == result.stride()
        and value.device == result.device
        and _whole(value)
    )


def from_zeros_without_memory(nodes: Iterable[Node]) -> set[Node]:
    """Return the calls, of a graph's nodes in order, that depend on a gradient of zeros (`sgn`'s).
    Torch keeps it without memory, and perhaps results computed from it, so that they cannot be
    overwritten."""
    found: set[Node] = set()
    for node in nodes:
        zeros = node.target is _aten._efficientzerotensor.default
        if zeros or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found

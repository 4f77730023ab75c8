"""Calls kernels with little work of the host: by torch's own bindings, below autograd.

An operator's overload takes its arguments apart by the schema, packs them for the dispatcher and
runs autograd's part, which for a small kernel takes longer than the kernel. torch's functions and
methods in C (`torch.addmm`, `Tensor.view`) call the dispatcher without packing. One is used only
where it asks the dispatcher for the same overload with the same arguments, which is tried on
tensors without data. Autograd's part records nothing inside a planned step, so that kernels run
below it; what is not ATen's or memopt's may bring an autograd of its own, and runs above.

All that holds for plain tensors and as long as nobody looks on: under a mode, or with tensors of
other classes, a step runs by the overloads themselves.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.step.kernel import FusedKernel
from memopt.torch_private.modes import TorchDispatchMode, nobody_looks_on
from memopt.torch_private.operators import OpOverload, bindings_of, unwrapped

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_WITHOUT_AUTOGRAD = frozenset({"aten", "prims", "memopt"})
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def all_plain(*given: Iterable[Any]) -> bool:
    """Return whether a step with these arguments may call kernels directly: no mode looks on, and
    no tensor is of a class that may take part in operations."""
    kinds: set[type] = set()
    for values in given:
        kinds.update(map(type, values))
    return nobody_looks_on() and not any(issubclass(kind, torch.Tensor) for kind in kinds - _PLAIN)


def runs_below_autograd(target: Any) -> bool:
    """Return whether a call can run below autograd: a kernel of ATen's or of memopt's, which uses
    no autograd inside."""
    if isinstance(target, OpOverload):
        return target.namespace in _WITHOUT_AUTOGRAD
    return isinstance(target, FusedKernel) or target is operator.getitem


def direct(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the callable that runs an overload on arguments of this kind with the least work of
    the host.

    Args:
        target: the overload; other callables are returned as they are.
        args, kwargs: nodes, (fake) tensors and constants.
    """
    if not isinstance(target, OpOverload):
        found: Callable[..., Any] = target
        return found
    key = target, _kind(args), tuple((name, _kind(value)) for name, value in kwargs.items())
    if key not in _known:
        _known[key] = _binding(target, args, kwargs) or unwrapped(target)
    return _known[key]


_known: dict[Any, Callable[..., Any]] = {}


def _kind(value: Any) -> Any:
    """Return the kind of an argument, on which it may depend how a binding passes the argument on:
    its type, and a tensor's dtype and whether it has dimensions."""
    value = _value(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return type(value)


def _value(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, Node) else value


def _binding(
    target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return a binding that calls the overload with these arguments; None: there is none."""
    given = _without_data(args), {name: _without_data(one) for name, one in kwargs.items()}
    wanted = _first_call(target, given)
    if wanted is None or wanted[0] is not target:
        return None
    kinds = (types.BuiltinFunctionType, types.MethodDescriptorType)
    bindings = (one for one in bindings_of(target) if isinstance(one, kinds))
    return next((one for one in bindings if _same(wanted, _first_call(one, given))), None)


def _without_data(value: Any) -> Any:
    value = _value(value)
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_data, value))
    return value


class _Called(Exception):
    """Raised when a call reaches the dispatcher, to end it there; its arguments are the operator
    and the operator's arguments."""


class _First(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Called(func, args, kwargs or {})


def _first_call(function: Callable[..., Any], given: Arguments) -> tuple[Any, ...] | None:
    """Return the first operator that a call asks the dispatcher for, and its arguments."""
    try:
        with torch.no_grad(), _First():  # type: ignore[no-untyped-call]
            function(*given[0], **given[1])
    except _Called as called:
        return called.args
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        pass
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and (one == other or one != one)

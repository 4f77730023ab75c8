"""Tracing with the operators that eager runs, although torch would decompose them in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from memopt.models.locks import ForkedLock
from memopt.torch_private.access import attribute, known, private
from memopt.torch_private.operator_names import TAKEN_APART

ONE_TRACE_AT_A_TIME = ForkedLock()

_kernels = attribute("torch._ops.OpOverload.py_kernels")
_cached = attribute("torch._ops.OpOverload._dispatch_cache")


@contextlib.contextmanager
def kernels_kept_whole() -> Iterator[None]:
    """Trace with the operators that eager runs, not with Python decompositions of them."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    names = [f"torch.ops.aten.{name}" for name in TAKEN_APART]
    dropout = torch.ops.aten.dropout.default
    overloads = [dropout, *(private(name) for name in names if known(name))]
    with ONE_TRACE_AT_A_TIME:
        kept = [dict(_kernels(overload)) for overload in overloads]
        try:
            for overload in overloads:
                for key in keys:
                    whole = _kernels(overload).pop(key, None)
                    if overload is dropout and whole is not None:
                        _kernels(overload)[key] = _itself_or(whole)
                _cached(overload).clear()
            yield
        finally:
            for overload, kernels in zip(overloads, kept, strict=True):
                _kernels(overload).update(kernels)
                _cached(overload).clear()


def _itself_or(dropout: Callable[..., Any]) -> Callable[..., Any]:
    """Make a dropout that, if it drops nothing, returns its input, as the real one does. torch's
    decomposition returns a row-major copy: more memory, other strides, no update in place."""

    def kernel(given: torch.Tensor, p: float, train: bool | None) -> Any:
        return dropout(given, p, train) if train and p != 0 and given.numel() else given

    return kernel


def _pooled(variable: Any, translator: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    value = first.as_proxy().node.meta["example_value"]
    asked = kwargs.get("return_indices", args[5] if len(args) > 5 else None)
    with_indices = asked is not None and asked.as_python_constant()
    followed = with_indices or (value.requires_grad and torch.is_grad_enabled())
    if followed or value.device.type != "cpu" or value.is_contiguous():
        return None
    whole = first.call_method(translator, "contiguous", [], {})
    return variable.call_function(translator, [whole, *args], kwargs)


POOLED = dict.fromkeys((torch.max_pool1d, functional.max_pool1d), _pooled)
"""Handlers by which Dynamo traces `max_pool1d` with the layout that the CPU's kernel for tensors
without a gradient gives it, which is always contiguous; a trace takes the other kernel."""

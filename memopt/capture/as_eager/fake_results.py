"""Corrects fake kernels' results while a model is traced.

Operators that return a changed copy of a view copy the whole storage behind the view
(`at::clone_preserve_strides`). Some fake kernels do so, too, but torch's cache of fake results
remembers strides alone: when the same call is repeated, the storage is only as large as the view.
So the order of a trace's calls decided the sizes of a step's tensors, and whether a plan seemed to
be for another model.

Some kernels leave results on the host that fake kernels place on the device (`HOST_RESULTS`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memopt.step.memory_layout import expanded, storage_of
from memopt.step.nodes import HOST_RESULTS
from memopt.step.signature import output_mask
from memopt.torch_private.access import patched, private
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_DISPATCH = "torch._subclasses.fake_tensor.FakeTensorMode.dispatch"
_aten = torch.ops.aten
_COPY_STORAGES = frozenset(
    {
        _aten.copy.default,
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
    }
)
"""Operators whose result is the changed first argument, in a storage as large as the argument's."""


@contextlib.contextmanager
def fake_results_through(
    wanted: Callable[[Any, Any], bool], change: Callable[[Any, Any, Any, Any], Any]
) -> Iterator[None]:
    """Replace fake results by `change(overload, args, kwargs, result)` while this thread traces,
    wherever `wanted(overload, result)`. Copies of views get the storages that kernels give them."""
    asked = private(_DISPATCH)
    thread, inside = threading.get_ident(), False

    def dispatch(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != thread:
            return asked(self, func, types, args, kwargs or {})
        inside = True
        try:
            result = asked(self, func, types, args, kwargs or {})
            if result is NotImplemented:
                return result
            if func in _COPY_STORAGES:
                with self:
                    return _in_whole_storage(result, args[0])
            if type(result) is tuple and returns_new_tensors(func):
                with self:
                    whole = _asked_for(func, args, kwargs or {}, _placed(func, result))
                    result = _in_own_storages(whole)
            if not wanted(func, result):
                return result
            with self:
                return change(func, args, kwargs or {}, result)
        finally:
            inside = False

    with ONE_TRACE_AT_A_TIME, patched(_DISPATCH, dispatch):
        yield


@functools.cache
def returns_new_tensors(overload: Any) -> bool:
    """Return whether an operator is a kernel whose results are neither views nor its arguments
    (batch norm updates its statistics besides)."""
    if not isinstance(overload, OpOverload) or overload.namespace not in (
        "aten",
        "memopt",
    ):
        return False
    return all(one.alias_info is None for one in schema_of(overload).returns)


def _asked_for(
    func: Any, args: Any, kwargs: Mapping[str, Any], results: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the fake results that a call asks for: some fake kernels (`grid_sample`'s backward)
    describe all results, where the kernel omits those not asked for."""
    mask = output_mask(func, args, kwargs)
    if mask is None:
        return results
    return tuple(one if asked else None for one, asked in zip(results, mask, strict=True))


def _placed(func: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an operator's fake results, with those on the host that its kernel leaves there."""
    hosted = HOST_RESULTS.get(func, ())
    return tuple(
        torch.empty_like(one, device="cpu")
        if i in hosted and isinstance(one, Tensor) and one.device.type != "meta"
        else one
        for i, one in enumerate(results)
    )


def _in_own_storages(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a kernel's fake results in a storage each: the fake kernel of LSTM's backward on the
    CPU returns one tensor as the gradients of both biases, where the kernel returns two."""
    seen: set[int] = set()
    made = []
    for value in results:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            if storage_of(value) in seen:
                value = value.new_empty_strided(value.shape, value.stride())
            seen.add(storage_of(value))
        made.append(value)
    return tuple(made)


def _in_whole_storage(result: Tensor, of: Tensor) -> Tensor:
    """Return a fake result in a storage as large as that of the tensor it copies."""
    size_bytes = of.untyped_storage().nbytes()
    static = all(isinstance(n, int) for n in (size_bytes, *of.shape, *of.stride()))
    # Kernels copy what is expanded element by element. They see no other overlap.
    if not static or expanded(of) or result.untyped_storage().nbytes() == size_bytes:
        return result
    whole = result.new_empty(size_bytes // result.element_size())
    return whole.as_strided(of.shape, of.stride(), of.storage_offset())

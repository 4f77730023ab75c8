"""What fake kernels give while a model is traced, corrected.

Operators that return a changed copy of a view copy the whole storage that it looks into
(`at::clone_preserve_strides`). Fake kernels do so for some of them, and torch's cache of fake
results remembers strides alone: the second time the same call has a storage as small as the view.
Which a trace met first decided how large a step's tensors were, and that a plan was for another
model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memopt.step.memory_layout import storage_of
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
"""Their result is the first argument, changed, in a storage as large as the argument's."""


@contextlib.contextmanager
def fake_results_through(
    wanted: Callable[[Any, Any], bool], change: Callable[[Any, Any, Any, Any], Any]
) -> Iterator[None]:
    """Trace with `change(overload, args, kwargs, result)` in place of every result that this
    thread's fake kernels give and for which `wanted(overload, result)`; copies of views have the
    storages that kernels give them."""
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
                    result = _apart(_asked(func, args, kwargs or {}, result))
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
    """Whether an operator is a kernel whose results are no views, nor what it was given (batch
    norm updates its statistics beside)."""
    if not isinstance(overload, OpOverload) or overload.namespace not in (
        "aten",
        "memopt",
    ):
        return False
    return all(one.alias_info is None for one in schema_of(overload).returns)


def _asked(
    func: Any, args: Any, kwargs: Mapping[str, Any], results: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The fake results that a call asks for: some fake kernels describe all (of `grid_sample`'s
    backward), where the kernel leaves the others out."""
    mask = output_mask(func, args, kwargs)
    if mask is None:
        return results
    return tuple(one if asked else None for one, asked in zip(results, mask, strict=True))


def _apart(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fake results of a kernel in a storage each: the fake kernel of LSTM's backward on the CPU
    returns one tensor as the gradients of both biases, where the kernel returns two."""
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
    """A fake result in a storage as large as that of what it is a copy of."""
    size_bytes = of.untyped_storage().nbytes()
    static = all(isinstance(n, int) for n in (size_bytes, *of.shape, *of.stride()))
    if not static or _overlaps(of) or result.untyped_storage().nbytes() == size_bytes:
        return result
    whole = result.new_empty(size_bytes // result.element_size())
    return whole.as_strided(of.shape, of.stride(), of.storage_offset())


def _overlaps(value: Tensor) -> bool:
    """Whether kernels see that elements of a tensor share memory, by strides of zero alone: such a
    one is copied element by element."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )

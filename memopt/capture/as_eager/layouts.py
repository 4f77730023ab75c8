"""Asks kernels while tracing which memory layout their results have.

Fake kernels describe some results with other strides than the real kernels give them: torch takes
many operators apart in Python to find the shape (softplus's backward, smooth_l1_loss, batch norm of
a transposed tensor...), and the parts decide the layout. A graph traced with them has views that
fail at run time, and copies in another order than eager's. So each call on a tensor that is not
row-major without gaps runs once on stand-in data, and its fake result gets the real strides. The
strides of dimensions of size one count, too: by them products choose the kernel that multiplies (a
query of one token), and convolutions tell whether an image of one pixel has its channels last.
`view` is described in Python, with other strides for such dimensions; a meta tensor knows better.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memopt.capture.as_eager.fake_results import fake_results_through, returns_new_tensors
from memopt.step.backend import random_state_kept
from memopt.step.inputs import Call, device_of
from memopt.step.numerics import numeric_settings
from memopt.step.signature import (
    ENDS_PROCESS,
    REFUSALS,
    Answers,
    Signature,
    StandIns,
    call_signature,
)
from memopt.torch_private import pytree
from memopt.torch_private.aot import FakeTensor

_Layouts = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
_VIEW = torch.ops.aten.view.default
_known = Answers()
"""A call's text and its device → the strides of its results; () if its kernel refuses."""


def computing_device(model: nn.Module, call: Call) -> torch.device | None:
    """Return the device of a model's kernels; None if it is not to be computed (fake or meta)."""
    tensors = [*model.parameters(), *model.buffers(), *call.tensors()]
    if any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in tensors):
        return None
    return device_of(model, call)


@contextlib.contextmanager
def layouts_of_kernels(device: torch.device | None) -> Iterator[None]:
    """Trace inside with the layouts that a device's kernels give their results.

    Args:
        device: where the model runs; None: nothing may be computed, fake layouts stay.
    """

    def wanted(overload: Any, result: Any) -> bool:
        if overload is _VIEW:
            return 1 in result.shape and result.dim() > 1 and _static(result)
        return (
            device is not None
            and returns_new_tensors(overload)
            and any(_may_differ(value, device) for value in _leaves(result))
        )

    def corrected(overload: Any, args: Any, kwargs: Any, result: Any) -> Any:
        if overload is _VIEW:
            return _as_viewed(args[0], result)
        assert device is not None
        results = _leaves(result)
        given = (leaf for one in (*args, *kwargs.values()) for leaf in _leaves(one))
        everything = [v for v in (*given, *results) if isinstance(v, Tensor)]
        if not all(map(_static, everything)) or all(map(_row_major, everything)):
            return result
        call = call_signature(overload, args, kwargs)
        place = f"{device}|{torch.get_num_threads()}|{numeric_settings()}|{call.text}"
        return _restrided(result, _known.find(place, lambda: _measured(call, results, device)))

    with fake_results_through(wanted, corrected):
        yield


def _as_viewed(viewed: Tensor, view: Tensor) -> Tensor:
    """Return the view of a fake tensor with the strides that ATen gives it."""
    if not _static(viewed):
        return view
    found = _strides_of_view(tuple(viewed.shape), tuple(viewed.stride()), tuple(view.shape))
    if view.stride() == found:
        return view
    return viewed.as_strided(view.shape, found, viewed.storage_offset())


@functools.lru_cache(maxsize=10_000)
def _strides_of_view(
    viewed: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the strides that a tensor of shape `viewed` has when it is viewed as another shape."""
    meta = torch.device("meta")
    (found,) = _in_new_thread(
        lambda: [torch.empty_strided(viewed, strides, device=meta).view(shape).stride()]
    )
    return tuple(found)


def _leaves(value: Any) -> list[Any]:
    """Return pytree's leaves, ten times as fast for a value that is no container."""
    return pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else [value]


def _may_differ(value: Any, device: torch.device) -> bool:
    """Return whether a result can be laid out in more than one way."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device.type
        and value.layout is torch.strided
        and value.dim() > 1
    )


def _row_major(value: Tensor) -> bool:
    """Return whether a tensor is row-major without gaps, in the strides of size-1 dimensions,
    too."""
    if not value.is_contiguous():
        return False
    if 1 not in value.shape or value.dim() < 2:
        return True
    strides = itertools.accumulate(reversed(value.shape[1:]), operator.mul, initial=1)
    return tuple(value.stride()) == (*strides,)[::-1]


def _static(value: Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    sizes = (
        *value.shape,
        *value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
    )
    return all(isinstance(size, int) for size in sizes)


def _measured(call: Signature, results: list[Any], device: torch.device) -> _Layouts:
    """Return the strides of a call's results on stand-in data; () if its kernel refuses."""
    ends = call.target in ENDS_PROCESS
    real = [] if ends else _in_new_thread(lambda: _run(call, device))
    if len(real) != len(results):
        return ()
    return tuple(
        (tuple(one.stride()), one.dtype)
        if isinstance(one, Tensor) and isinstance(fake, Tensor) and one.shape == fake.shape
        else None
        for one, fake in zip(real, results, strict=True)
    )


def _in_new_thread(function: Callable[[], list[Any]]) -> list[Any]:
    """Return a function's results from a thread with none of the tracer's state: no modes, no keys
    switched off; [] if it fails."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(function()))
    thread.start()
    thread.join()
    return results


def _run(call: Signature, device: torch.device) -> list[Any]:
    """Return a call's results on stand-in data; [] if its kernel refuses the data."""
    with torch.no_grad(), random_state_kept([device]):
        args, kwargs = StandIns(device).arguments(call)
        try:
            return pytree.tree_leaves(call.target(*args, **kwargs))
        except REFUSALS:
            return []


def _restrided(result: Any, layouts: _Layouts) -> Any:
    """Give a fake result other strides."""
    leaves, spec = pytree.tree_flatten(result)
    if len(layouts) != len(leaves):
        return result
    made = [
        value.new_empty_strided(value.shape, wanted[0], dtype=wanted[1])
        if wanted is not None and (value.stride(), value.dtype) != wanted
        else value
        for value, wanted in zip(leaves, layouts, strict=True)
    ]
    return pytree.tree_unflatten(made, spec)

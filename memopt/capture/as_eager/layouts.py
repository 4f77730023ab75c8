"""The memory layout of what kernels return, asked of the kernels themselves while tracing.

Fake kernels describe some results with other strides than the real kernels give them: torch takes
many operators apart in Python to find the shape (softplus's backward, smooth_l1_loss, batch norm of
a transposed tensor...), and the parts decide the layout. A graph traced with them has views that
fail at run time, and copies in another order than eager's. So each call on a tensor that is not
row-major without gaps is run once on stand-in data, and its fake result gets the strides that came
back. Of images also the strides of dimensions of size one count: convolutions tell by them whether
an image of one pixel has its channels last, and take another kernel, of another workspace.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memopt.capture.as_eager.fake_results import fake_results_through, returns_new_tensors
from memopt.step.backend import random_state_kept
from memopt.step.inputs import Call, device_of
from memopt.step.memory_layout import same_strides
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

_Strides = tuple[tuple[int, ...] | None, ...]
_known = Answers()
"""Text of a call, and where it runs → the strides of its results; () if its kernel refuses."""


def computing_device(model: nn.Module, call: Call) -> torch.device | None:
    """Where the kernels of a model run; None for one that is not to be computed (fake or meta)."""
    tensors = [*model.parameters(), *model.buffers(), *call.tensors()]
    if any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in tensors):
        return None
    return device_of(model, call)


@contextlib.contextmanager
def layouts_of_kernels(device: torch.device | None) -> Iterator[None]:
    """Trace with the layouts that the kernels of a device give their results.

    Args:
        device: where the model runs; None: nothing may be computed, fake layouts stay.
    """

    def wanted(overload: Any, result: Any) -> bool:
        return (
            device is not None
            and returns_new_tensors(overload)
            and any(_may_differ(value, device) for value in _leaves(result))
        )

    def corrected(overload: Any, args: Any, kwargs: Any, result: Any) -> Any:
        assert device is not None
        results = _leaves(result)
        given = (leaf for one in (*args, *kwargs.values()) for leaf in _leaves(one))
        everything = [v for v in (*given, *results) if isinstance(v, Tensor)]
        if not all(map(_static, everything)) or all(map(_row_major, everything)):
            return result
        call = call_signature(overload, args, kwargs)
        place = f"{device}|{torch.get_num_threads()}|{call.text}"
        return _restrided(result, _known.find(place, lambda: _measured(call, results, device)))

    with fake_results_through(wanted, corrected):
        yield


def _leaves(value: Any) -> list[Any]:
    """What pytree finds, which takes ten times as long for what is no nest."""
    return pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else [value]


def _may_differ(value: Any, device: torch.device) -> bool:
    """Whether a result can be laid out in more than one way."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device.type
        and value.layout is torch.strided
        and (
            sum(isinstance(size, int) and size > 1 for size in value.shape) > 1 or _is_image(value)
        )
    )


def _is_image(value: Tensor) -> bool:
    """Whether a tensor has the dimensions of images or volumes, which may have channels last."""
    return value.dim() in (4, 5)


def _row_major(value: Tensor) -> bool:
    """Whether a tensor is row-major without gaps, and an image in every stride."""
    if not value.is_contiguous():
        return False
    if not _is_image(value):
        return True
    strides = itertools.accumulate(reversed(value.shape[1:]), operator.mul, initial=1)
    return tuple(value.stride()) == (*strides,)[::-1]


def _static(value: Tensor) -> bool:
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return value.layout is torch.strided and all(isinstance(size, int) for size in sizes)


def _measured(call: Signature, results: list[Any], device: torch.device) -> _Strides:
    """The strides of a call's results on stand-in data."""
    real: list[Any] = []
    if call.target not in ENDS_PROCESS:
        # A thread of its own has nothing of the tracer's state: no modes, no keys switched off.
        thread = threading.Thread(target=lambda: real.extend(_run(call, device)))
        thread.start()
        thread.join()
    if len(real) != len(results):
        return ()
    return tuple(
        tuple(one.stride())
        if isinstance(one, Tensor) and isinstance(fake, Tensor) and one.shape == fake.shape
        else None
        for one, fake in zip(real, results, strict=True)
    )


def _run(call: Signature, device: torch.device) -> list[Any]:
    """The results of a call on stand-in data; [] if its kernel refuses them."""
    with torch.no_grad(), random_state_kept([device]):
        args, kwargs = StandIns(device).arguments(call)
        try:
            return pytree.tree_leaves(call.target(*args, **kwargs))
        except REFUSALS:
            return []


def _restrided(result: Any, strides: _Strides) -> Any:
    """A fake result with other strides, where they differ in what matters."""
    leaves, spec = pytree.tree_flatten(result)
    if len(strides) != len(leaves):
        return result
    made = [
        value.new_empty_strided(value.shape, wanted)
        if wanted is not None and not _laid_out(value, wanted)
        else value
        for value, wanted in zip(leaves, strides, strict=True)
    ]
    return pytree.tree_unflatten(made, spec)


def _laid_out(value: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides, where they are more than a name for one element; an
    image has them all."""
    return tuple(value.stride()) == strides if _is_image(value) else same_strides(value, strides)

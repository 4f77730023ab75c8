"""Finds captures that are in use, for another plan of the same call.

Capturing a model takes seconds, and any number of plans can run in one capture. One capture serves
the plans of a step's first micro-batch and of its later ones, which charge existing gradients, and
also `Plan.check` and `Plan.apply`. A capture is remembered while a planned module or a plan holds
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.capture.capture import capture
from memopt.models.record import OutputGradients
from memopt.step.captured import Captured
from memopt.step.described import described
from memopt.step.input_values import other_values
from memopt.step.inputs import Call, device_of, repeated
from memopt.step.record import record_of
from memopt.user_code.aside import aside

_Kind: TypeAlias = tuple[Any, ...]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, list[tuple[_Kind, weakref.ref[Captured]]]]
_KNOWN = weakref.WeakKeyDictionary()


@aside
def reused_capture(
    model: nn.Module,
    call: Call,
    gradients: Callable[[], OutputGradients],
    make: Callable[..., Captured] = capture,
    *,
    kernels: str = "aten",
) -> Captured:
    """Reuse a capture of an equal call that is still in use, if nothing that it depends on has
    changed; else capture the model. The result has the given call as its example call.

    Args:
        model, call, gradients: as for `capture`.
        make: `capture` or a function like it; raises its errors.
        kernels: the kernels that the step is to run. Compiled ones change the capture in place, so
            that it is always new and serves no other plan.
    """
    if kernels != "aten":
        return make(model, call, gradients)
    kind = _kind(model, call)
    alive = [(k, ref) for k, ref in _KNOWN.get(model, []) if ref() is not None]
    made = None
    for known, ref in alive:
        found = ref()
        if found is None or known != kind or found.dependencies.changed(model) is not None:
            continue
        other = next(other_values(found.dependencies.values, call.leaves), None)
        if other is not None or found.odds.have_turned:
            continue
        if found.outputs.gradients == gradients():
            made = replace(found, call=call)
            break
    if made is None:
        made = make(model, call, gradients)
    _KNOWN[model] = [*alive, (kind, weakref.ref(made))]
    return made


def _kind(model: nn.Module, call: Call) -> _Kind:
    """Return a key that two calls share only if one capture can serve both. What captures check
    themselves (`Captured.dependencies`) is no part of it."""
    leaves = [
        (described(leaf), isinstance(leaf, torch.Tensor) and leaf.is_leaf) for leaf in call.leaves
    ]
    tied = tuple(repeated(call.leaves).items())
    record = record_of(model, Call((), {}), device_of(model, call))
    return record, call.spec, tuple(leaves), tied, call.whole_masks, call.orders

"""Captures that are in use, found again for another plan of the same call.

To capture a model takes seconds, and any number of plans run in one capture. So the plans of a
step's first micro-batch and of its later ones, which charge the gradients that are there, share
one, and so do `Plan.check` and `Plan.apply`. A capture is remembered while something holds it: a
planned module, or a plan.
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
from memopt.step.inputs import Call, device_of, repeated
from memopt.step.reader import described
from memopt.step.record import record_of
from memopt.user_code.aside import aside

_Kind: TypeAlias = tuple[Any, ...]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, list[tuple[_Kind, weakref.ref[Captured]]]]
_KNOWN = weakref.WeakKeyDictionary()


@aside
def captured_again(
    model: nn.Module,
    call: Call,
    gradients: Callable[[], OutputGradients],
    make: Callable[..., Captured] = capture,
    *,
    kernels: str = "aten",
) -> Captured:
    """The capture in use of a call like this one, for this call, if nothing has changed that it
    depends on; else a new one.

    Args:
        model, call, gradients: as for `capture`.
        make: `capture`, which see for its errors.
        kernels: what the step is to run. Compiled ones change the capture in place: such a one is
            always new, and no other plan's.
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
        if found.outputs.gradients == gradients():
            made = replace(found, call=call)
            break
    if made is None:
        made = make(model, call, gradients)
    _KNOWN[model] = [*alive, (kind, weakref.ref(made))]
    return made


def _kind(model: nn.Module, call: Call) -> _Kind:
    """What captures depend on beside what they watch themselves."""
    leaves = [
        (described(leaf), isinstance(leaf, torch.Tensor) and leaf.is_leaf) for leaf in call.leaves
    ]
    tied = tuple(repeated(call.leaves).items())
    record = record_of(model, Call((), {}), device_of(model, call))
    return record, call.spec, tuple(leaves), tied, call.whole_masks

"""Proves for which lengths the captured step is the same but for its sizes.

The model is traced once more, with a symbol for the length. torch notes each decision that Python
code, an operator's own code or autograd takes by comparing sizes, and writes each size in terms of
the symbol. Where all are polynomials of the length, a few captures determine them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

import torch
from torch import nn

from memopt.capture.as_eager.corrections import deriving_as_eager, tracing_as_eager
from memopt.capture.as_eager.layouts import computing_device
from memopt.capture.lean_trace import lean_trace
from memopt.capture.trace import trace_of
from memopt.capture.training_call import training_call
from memopt.errors import CaptureError
from memopt.step.inputs import Call
from memopt.torch_private import aot, pytree
from memopt.torch_private.symbols import (
    Symbols,
    of_varying_length,
    placeholder_values,
    symbols_of,
)
from memopt.user_code.aside import aside

_LOG = logging.getLogger(__name__)


@aside
def any_length(
    model: nn.Module, call: Call, where: Mapping[int, tuple[int, ...]]
) -> Symbols | None:
    """Return the conditions on a varying length that a model's step relies on; None if they are not
    known.

    Args:
        model: the model.
        call: an example call, its length at least 2.
        where: position among the call's arguments → its dimensions of that length.
    """
    varying = call.with_tensors_at(where, lambda at, one: of_varying_length(one, where[at]))
    varying = training_call(model, varying)
    try:
        position, dims = next(iter(where.items()))
        return _symbols(model, varying, call.leaves[position].shape[dims[0]])
    except (CaptureError, RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
        # torch cannot trace it with a symbol, or memopt's own code wants numbers.
        _LOG.info("each length has a plan of its own: %s", str(error).partition("\n")[0])
        return None


def _symbols(model: nn.Module, call: Call, length: int) -> Symbols | None:
    with tracing_as_eager(computing_device(model, call)), lean_trace():
        traced, _ = trace_of(model, call)
        fakes, (leaves, spec) = placeholder_values(traced), pytree.tree_flatten(call.plain)
        if len(fakes) != len(leaves):
            return None
        leaves = [
            fake if isinstance(fake, torch.Tensor) else leaf
            for fake, leaf in zip(fakes, leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with contextlib.ExitStack() as stack, deriving_as_eager(traced):
            joint = aot.export_joint(stack, traced, args, kwargs)
            return symbols_of(list(joint.graph_module.graph.nodes), length)

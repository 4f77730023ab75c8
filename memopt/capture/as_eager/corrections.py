"""Applies all corrections of this package to a model's trace.

Hugging Face's decoders, called without an attention mask, ask whether their positions belong to
several packed sequences. Eager reads them, finds one sequence and lets the attention kernel be
causal. A trace cannot read them: it makes a mask of S × S for every sequence and repeats keys and
values for every head, which gives other bits, more memory, and on CUDA not the flash kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.fx import GraphModule

from memopt.capture.as_eager.layouts import layouts_of_kernels
from memopt.capture.as_eager.masks import arguments_of
from memopt.capture.as_eager.results import correct_fake_results
from memopt.models.locks import ForkedLock
from memopt.step.casts import casts_as_eager
from memopt.step.dropout import dropout_as_eager
from memopt.step.functions import functions_as_eager
from memopt.step.updates import InPlaceAsEager, with_own_names
from memopt.torch_private.dynamo import comptime

T = TypeVar("T")


@contextmanager
def tracing_as_eager(device: torch.device | None) -> Iterator[None]:
    """Trace inside with the layouts of a device's kernels; None: nothing may be computed."""
    with torch.enable_grad(), layouts_of_kernels(device):
        yield


@contextmanager
def deriving_as_eager(traced: GraphModule) -> Iterator[None]:
    """Return a context in which AOTAutograd derives, from dynamo's graph, a joint graph with
    eager's bits. Dynamo's graph is changed.

    Enter it inside `tracing_as_eager`, and pass the resulting joint graph to `corrected`.
    """
    functions_as_eager(traced)
    with casts_as_eager(), InPlaceAsEager():
        yield


def corrected(joint: GraphModule) -> None:
    """Give a joint graph, in place, eager's operator names, results and dropout."""
    with_own_names(joint)
    correct_fake_results(joint)
    dropout_as_eager(joint)


_ONE_AT_A_TIME = ForkedLock()


class _PackedPositions(Exception):
    """The positions depend on the call's tensors, so sequences may be packed."""


def with_one_sequence(trace: Callable[[], T]) -> T:
    """Run `trace`; decoders that make their positions themselves are traced as eager runs them."""
    with _ONE_AT_A_TIME:
        try:
            with _one_sequence():
                return trace()
        except _PackedPositions:
            return trace()


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Trace inside as if no sequences were packed.

    Raises:
        _PackedPositions: (after the trace) the positions depend on the model's arguments.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    at_trace = comptime()
    given: list[bool] = []

    def look(context: Any) -> None:
        given.append(bool(arguments_of(context.get_local("position_ids").as_proxy().node)))

    def none_packed(position_ids: Any) -> None:
        at_trace(look)

    with mock.patch.object(masking, "find_packed_sequence_indices", none_packed):
        yield
    if any(given):
        raise _PackedPositions

"""Applies everything in this package to a model's trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from memopt.profiler.as_eager.backward import backwards_as_eager
from memopt.profiler.as_eager.draws import DrawsAsEager, with_own_names
from memopt.profiler.as_eager.dropout import dropout_as_eager
from memopt.profiler.as_eager.layouts import layouts_of_kernels
from memopt.profiler.as_eager.packed_positions import with_one_sequence
from memopt.profiler.as_eager.results import correct_fake_results
from memopt.profiler.as_eager.updates import UpdatesAsEager
from memopt.profiler.as_eager.vectors import values_alone

T = TypeVar("T")

_Correct = Callable[[GraphModule], None]

_IN_DYNAMOS_GRAPH: tuple[_Correct, ...] = (values_alone, backwards_as_eager)
_IN_THE_JOINT_GRAPH: tuple[_Correct, ...] = (with_own_names, correct_fake_results, dropout_as_eager)


@contextmanager
def tracing_as_eager(device: torch.device | None) -> Iterator[Callable[[Callable[[], T]], T]]:
    """Trace inside as the kernels of a device run; None: nothing may be computed.

    Yields:
        What makes dynamo's trace: `traced(trace)` is `trace()`.
    """
    with torch.enable_grad(), layouts_of_kernels(device):
        yield with_one_sequence


def joint_as_eager(
    traced: GraphModule, export: Callable[[], Any], prepare: Callable[[GraphModule], None]
) -> Any:
    """AOTAutograd's joint graph of a dynamo graph, with eager's bits; inside `tracing_as_eager`.

    Args:
        traced: dynamo's graph; changed in place.
        export: makes the joint graph of it.
        prepare: what is to be done to the joint graph first.
    """
    for correct in _IN_DYNAMOS_GRAPH:
        correct(traced)
    with DrawsAsEager(), UpdatesAsEager():
        joint = export()
    prepare(joint.graph_module)
    for correct in _IN_THE_JOINT_GRAPH:
        correct(joint.graph_module)
    return joint

"""Traces without what a trace alone does not need: copies, garbage collections, descriptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from memopt.models.garbage import cycles_collected, full_collections_deferred
from memopt.torch_private.access import optional, patched
from memopt.torch_private.aot import code_written_late, values_described_once
from memopt.torch_private.distributed import nothing_tried_out
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_CLONE = "torch._dynamo.variables.builder._clone_input"
_COMPUTE = "torch._dynamo.variables.tensor.get_real_value"


@contextlib.contextmanager
def real_values_uncopied() -> Iterator[None]:
    """Trace without copies of parameters, buffers, inputs and their gradients.

    An export copies each real tensor that it meets, in case something computes with it: the model's
    size in memory once more, and as much for its gradients. Few models do (a function of
    `torch._dynamo.assume_constant_result` that is given a tensor), and they get copies then. Under
    a transform (`torch.func.vmap`, `grad`) a copy would fail: the tensor has no memory of its own.
    """
    clone, compute = optional(_CLONE), optional(_COMPUTE)
    if clone is None or compute is None:
        yield
        return
    copied: set[Node] = set()

    def itself(value: Any, _mode: Any) -> Any:
        return value

    def computed(node: Node, tracer: Any) -> Any:
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in copied:
                continue
            copied.add(one)
            if one in tracer.real_value_cache:
                tracer.real_value_cache[one] = clone(tracer.real_value_cache[one], None)
            waiting += one.all_input_nodes
        return compute(node, tracer)

    with patched(_CLONE, itself), patched(_COMPUTE, computed):
        yield


@contextlib.contextmanager
def lean_trace() -> Iterator[None]:
    """Trace without full garbage collections, without writing the Python code of graphs until they
    run, without describing every value twice, and without what torch tries out meanwhile."""
    with (
        ONE_TRACE_AT_A_TIME,
        cycles_collected(),
        full_collections_deferred(),
        code_written_late(),
        values_described_once(),
        nothing_tried_out(),
    ):
        yield

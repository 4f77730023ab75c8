"""What a dynamo trace keeps of real tensors: nothing, unless it computes with them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.fx import Node


@contextlib.contextmanager
def real_values_uncopied() -> Iterator[None]:
    """Trace without copies of parameters, buffers, inputs and their gradients.

    An export keeps a copy of each real tensor that it meets, in case something computes with it: a
    model would take its own size in memory once more, and as much for its gradients. Few do (a
    function of `torch._dynamo.assume_constant_result` that is given a tensor), and they get copies
    then. Under a transform (`torch.func.vmap`, `grad`) a copy would fail: it is of a tensor without
    memory of its own.
    """
    builder = importlib.import_module("torch._dynamo.variables.builder")
    tensors = importlib.import_module("torch._dynamo.variables.tensor")
    clone = getattr(builder, "_clone_input", None)
    compute = getattr(tensors, "get_real_value", None)
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

    with (
        mock.patch.object(builder, "_clone_input", itself),
        mock.patch.object(tensors, "get_real_value", computed),
    ):
        yield

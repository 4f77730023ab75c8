"""Traces autocast's casts as eager makes them.

In a `with torch.autocast`, eager casts a parameter once, however often it is used, and so adds up
its gradients in the lower precision; a trace casts it at each use and adds them in float32. Eager's
backward runs after the `with` and casts nothing; a trace casts there, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from memopt.models.locks import ForkedLock
from memopt.torch_private.aot import leaves_cast_once

_ATEN = torch.ops.aten
_CAST = frozenset({_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.matmul, _ATEN.linear})
"""Operators that backwards consist of and autocast casts."""
_ONE_AT_A_TIME = ForkedLock()


@contextlib.contextmanager
def casts_as_eager() -> Iterator[None]:
    """Trace a joint graph with eager's casts.

    Autocast caches casts of leaves alone; a trace's tensors stand for leaves without being any.
    """
    with _ONE_AT_A_TIME, leaves_cast_once():
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def backward_would_cast(module: GraphModule) -> bool:
    """Return whether a joint graph's backward computes in float32 what autocast, if it were on
    there, would compute in a lower precision."""
    return any(
        node.meta.get("partitioner_tag") == "is_backward"
        and getattr(node.target, "overloadpacket", None) in _CAST
        and node.meta["val"].dtype == torch.float32
        for node in module.graph.nodes
    )

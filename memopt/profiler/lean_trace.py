"""Traces without work that nothing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memopt.profiler.garbage import full_collections_put_off
from memopt.profiler.torch_private import ONE_TRACE_AT_A_TIME, imported


@contextlib.contextmanager
def lean_trace() -> Iterator[None]:
    """Trace without full garbage collections, and without writing the Python code of graphs that
    are never run: it is written when they run."""
    lazy = imported("torch.fx._lazy_graph_module", "_use_lazy_graph_module")
    with ONE_TRACE_AT_A_TIME, full_collections_put_off(), lazy(True):
        yield

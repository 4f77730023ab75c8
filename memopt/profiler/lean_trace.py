"""Traces without work that nothing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from memopt.models.garbage import full_collections_put_off
from memopt.profiler.torch_private import ONE_TRACE_AT_A_TIME, imported


@contextlib.contextmanager
def lean_trace() -> Iterator[None]:
    """Trace without full garbage collections, without writing the Python code of graphs that are
    never run (it is written when they run), and without a second description of every value."""
    lazy = imported("torch.fx._lazy_graph_module", "_use_lazy_graph_module")
    proxies = imported("torch.fx.experimental", "proxy_tensor")
    undescribed = mock.patch.object(proxies, "_extract_tensor_metadata", _nothing)
    with ONE_TRACE_AT_A_TIME, full_collections_put_off(), lazy(True), undescribed:
        yield


def _nothing(_value: Any) -> None:
    """No description of a value."""

"""Traces without work that nothing needs."""

from __future__ import annotations

import contextlib
import threading
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
    with ONE_TRACE_AT_A_TIME, full_collections_put_off(), lazy(True), _values_described_once():
        yield


@contextlib.contextmanager
def _values_described_once() -> Iterator[None]:
    """A traced node's `val` says all that its `tensor_meta` would. Other threads' traces, which
    Inductor may compile, have both."""
    proxies = imported("torch.fx.experimental", "proxy_tensor")
    describe, thread = proxies._extract_tensor_metadata, threading.get_ident()

    def described(value: Any) -> Any:
        return None if threading.get_ident() == thread else describe(value)

    with mock.patch.object(proxies, "_extract_tensor_metadata", described):
        yield

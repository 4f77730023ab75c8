"""Traces without needless work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memopt.models.garbage import full_collections_deferred
from memopt.torch_private.aot import code_written_late, values_described_once
from memopt.torch_private.distributed import nothing_tried_out
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME


@contextlib.contextmanager
def lean_trace() -> Iterator[None]:
    """Trace without full garbage collections, without writing the Python code of graphs that are
    never run (it is written when they run), and without a second description of every value, or
    what torch tries out meanwhile."""
    with (
        ONE_TRACE_AT_A_TIME,
        full_collections_deferred(),
        code_written_late(),
        values_described_once(),
        nothing_tried_out(),
    ):
        yield

"""Where a thread is while autograd runs a backward: private torch names beside those of
`memopt.profiler.torch_private`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from memopt.profiler.torch_private import imported


def inside_backward() -> bool:
    """Whether this thread is inside a backward."""
    return bool(imported("torch._C", "_current_graph_task_id")() != -1)


def when_backward_is_over(call: Callable[[], None]) -> None:
    """Call something once the backward that this is inside of has returned or failed, autograd's
    state of the thread put back."""

    def over() -> None:
        pass

    # Autograd holds what it calls at the end for as long as it holds the backward.
    weakref.finalize(over, call).atexit = False
    imported("torch.autograd", "Variable")._execution_engine.queue_callback(over)

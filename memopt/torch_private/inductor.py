"""Inductor: compiling regions, and dividing joint graphs for it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from memopt.torch_private.access import optional, private, required

with required("torch._inductor.custom_graph_pass.CustomPartitionerFn"):
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn


def inductor_set(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context with these settings of Inductor."""
    for name in settings:
        private(f"torch._inductor.config.{name}")
    config: Any = importlib.import_module("torch._inductor.config")
    patch: contextlib.AbstractContextManager[None] = config.patch(settings)
    return patch


def traced_with(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor compiles with this fake mode."""
    context = private("torch._guards.TracingContext")(fake_mode)
    tracing: contextlib.AbstractContextManager[Any] = private("torch._guards.tracing")(context)
    return tracing


def inside_of(run: Any) -> Any | None:
    """Return the inner function that a compiled region calls once it has run; None before."""
    if optional("torch._inductor.output_code.CompiledFxGraph.current_callable") is None:
        return None
    return getattr(run, "current_callable", None)


def divided_by_torch() -> Callable[..., Any]:
    """Return torch's own partitioner of joint graphs, by a minimum cut."""
    divide: Callable[..., Any] = private(
        "torch._functorch.partitioners.min_cut_rematerialization_partition"
    )
    return divide

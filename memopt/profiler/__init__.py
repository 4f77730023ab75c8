"""From a PyTorch model to the cost model: capture, measure, baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memopt.profiler.baseline import Loss as Loss
from memopt.profiler.cache import ProfileCache as ProfileCache
from memopt.profiler.measure import MeasureOptions as MeasureOptions
from memopt.profiler.session import Profiled as Profiled
from memopt.profiler.session import profile_model as profile_model


def profiled_of(
    model: Any,
    inputs: Any,
    loss_fn: Callable[..., Any] | None,
    targets: tuple[Any, ...],
    cache: bool,
    progress: Callable[[float, str], None],
) -> Profiled:
    """What `memopt.plan` takes as a model, profiled: a Profiled as it is, a module measured.

    Raises:
        ValueError: something else, or a module without inputs.
    """
    if isinstance(model, Profiled):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(
            "plan takes an nn.Module with example inputs, or a memopt Chain or Graph, got "
            f"{type(model).__name__}"
        )
    if inputs is None:
        raise ValueError("plan(model, inputs): example inputs are needed to capture the model")
    return profile_model(
        model,
        inputs,
        loss=None if loss_fn is None else Loss(loss_fn, tuple(targets)),
        options=MeasureOptions(cache=ProfileCache() if cache else None),
        progress=progress,
    )

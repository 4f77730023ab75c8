"""Isolates planning from its caller's surroundings: the user's hooks on saved tensors, dispatch
modes, context variables, `parametrize.cached`, anomaly detection and inference mode."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

from memopt.torch_private.modes import (
    DeviceContext,
    dispatch_modes,
    dispatch_modes_off,
    function_modes,
    saved_tensor_hooks_off,
)
from memopt.torch_private.modules import parametrized_cached, parametrized_uncached
from memopt.user_code.reached_state import ReachedState

P = ParamSpec("P")
R = TypeVar("R")


def aside(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run without its caller's surroundings; context variables that it sets are not
    set for the caller."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        def here() -> R:
            with surroundings_off():
                return function(*args, **kwargs)

        return contextvars.copy_context().run(here)

    return run


@contextmanager
def surroundings_off() -> Iterator[None]:
    """Switch off the caller's surroundings inside: a checkpoint around a call would save planning's
    tensors for its backward, and a counter of operations would count planning's."""
    with ExitStack() as stack:
        stack.enter_context(saved_tensor_hooks_off())
        modes = dispatch_modes()
        # Modes of torch's own traces stay.
        if modes and not any(mode.is_infra_mode() for mode in modes):
            stack.enter_context(dispatch_modes_off())
        functions = function_modes()
        if functions:
            # Function modes stay, since a forward may depend on them; their state is restored.
            stack.callback(ReachedState(functions).restore)
        if parametrized_cached():
            # A cached value has a graph, which the first backward frees.
            stack.enter_context(parametrized_uncached())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def mode_around() -> str | None:
    """Return the class name of a user's mode that sees the operators or functions called here;
    None: there is none. A mode that sets the device of new tensors does not count."""
    found = function_modes()
    found += [mode for mode in dispatch_modes() if not mode.is_infra_mode()]
    names = (type(mode) for mode in found if not isinstance(mode, DeviceContext))
    return next((one.__name__ for one in names if not one.__module__.startswith("memopt.")), None)

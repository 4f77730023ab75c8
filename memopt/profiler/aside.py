"""Planning stands aside of what surrounds its caller: the user's hooks on saved tensors, dispatch
modes, context variables, `parametrize.cached`, anomaly detection and inference mode."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar
from unittest import mock

import torch
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from memopt.profiler.reached_state import ReachedState
from memopt.profiler.torch_private import imported

P = ParamSpec("P")
R = TypeVar("R")


def aside(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs outside of what surrounds its caller, and sets no context variable
    there."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        def here() -> R:
            with surroundings_off():
                return function(*args, **kwargs)

        return contextvars.copy_context().run(here)

    return run


@contextmanager
def surroundings_off() -> Iterator[None]:
    """Inside, nothing of what surrounds the caller looks on: a checkpoint around a call would keep
    for its backward what planning saves, a counter of operations would count what it runs."""
    with ExitStack() as stack:
        stack.enter_context(_saved_tensor_hooks_off())
        modes = imported("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack")()
        # Those of torch's own traces stay.
        if modes and not any(mode.is_infra_mode() for mode in modes):
            off = imported("torch.utils._python_dispatch", "_disable_current_modes")
            stack.enter_context(off())
        functions = imported("torch.overrides", "_get_current_function_mode_stack")()
        if functions:
            # These stay, for a forward may depend on them; what they count or keep does not.
            stack.callback(ReachedState(functions).put_back)
        if parametrize._cache_enabled:
            # What is cached has a graph, which the first backward frees.
            off = mock.patch.multiple(parametrize, _cache_enabled=0, _cache={})
            stack.enter_context(off)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def mode_around() -> str | None:
    """The class of a mode of the user's that sees every operator or function that is called here;
    None: there is none. One that sets the device of new tensors changes nothing else."""
    found: list[object] = []
    if torch._C._len_torch_function_stack():
        found += imported("torch.overrides", "_get_current_function_mode_stack")()
    if torch._C._len_torch_dispatch_stack():
        modes = imported("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack")()
        found += [mode for mode in modes if not mode.is_infra_mode()]
    names = (type(mode) for mode in found if not isinstance(mode, DeviceContext))
    return next((one.__name__ for one in names if not one.__module__.startswith("memopt.")), None)


@contextmanager
def function_modes_off() -> Iterator[None]:
    """Without the caller's function modes, whose work is in Dynamo's graph already."""
    pop, push = imported("torch.overrides", "_pop_mode"), imported("torch.overrides", "_push_mode")
    taken: list[object] = []
    try:
        while torch._C._len_torch_function_stack():
            taken.append(pop())
        yield
    finally:
        while taken:
            push(taken.pop())


@contextmanager
def _saved_tensor_hooks_off() -> Iterator[None]:
    """Without the caller's hooks on saved tensors."""
    top = imported("torch._C._autograd", "_top_saved_tensors_default_hooks")
    pop = imported("torch._C._autograd", "_pop_saved_tensors_default_hooks")
    push = imported("torch._C._autograd", "_push_saved_tensors_default_hooks")
    taken = []
    try:
        while (hooks := top(True)) is not None:
            pop()
            taken.append(hooks)
        yield
    finally:
        while taken:
            push(*taken.pop())

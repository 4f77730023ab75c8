"""Hooks of engines on a module: torch's `replicate` and `fully_shard` gather its parameters before
its forward, and prepare the reduction of its gradients after it; DeepSpeed starts its timers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.torch_private.modules import FORWARD_PRE_HOOKS, forward_hooks_of
from memopt.torch_private.tensors import hooks_on_the_way

_DEEPSPEED = "deepspeed.runtime.engine"
_ENGINES = ("torch.distributed.", _DEEPSPEED)
_TRAINERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
_OTHERS = (*_ENGINES, *_TRAINERS, "memopt.")


def users_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks on a tensor's gradient on its way that no engine or trainer has set, nor
    memopt for what another planned call computes of it: theirs change no gradient."""
    found = []
    for hook in (hooks_on_the_way(tensor) or {}).values():
        owner = getattr(hook, "__self__", None)
        made_by = getattr(hook, "func", hook) if owner is None else type(owner)
        if not str(getattr(made_by, "__module__", "")).startswith(_OTHERS):
            found.append(hook)
    return found


def is_of_several(hook: Any) -> bool:
    """Return whether a hook is of `torch.autograd.graph.register_multi_grad_hook`."""
    return getattr(hook, "__globals__", None) is vars(torch.autograd.graph)


def _is_engines(hook: Any) -> bool:
    """Return whether a hook is a method of an engine's state, or a function of DeepSpeed's."""
    owner = getattr(hook, "__self__", None)
    if owner is None:
        return str(getattr(hook, "__module__", None)).startswith(_DEEPSPEED)
    return type(owner).__module__.startswith(_ENGINES)


def _registries(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after a module's forward, by number."""
    return getattr(module, FORWARD_PRE_HOOKS), forward_hooks_of(module)


def has_engine(module: nn.Module) -> bool:
    """Return whether an engine has hooks on the module's own calls."""
    return any(_is_engines(hook) for hooks in _registries(module) for hook in hooks.values())


def optimizer_of_engine(module: nn.Module) -> Any:
    """Return DeepSpeed's optimizer that holds a module's master weights; None if there is none. It
    is found through the engine's hooks on the module."""
    hooks = [one for both in _registries(module) for one in both.values() if _is_engines(one)]
    cells = [cell for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
    found = [getattr(cell.cell_contents, "optimizer", None) for cell in cells]
    own = [one for one in found if type(one).__module__.startswith("deepspeed.runtime.")]
    return own[0] if own else None


@contextmanager
def engine_off(module: nn.Module) -> Iterator[tuple[list[Any], list[Any]]]:
    """Take an engine's hooks off a module inside.

    Yields:
        Those before and those after its forward, in the order in which they run.
    """
    registries = _registries(module)
    kept = [dict(hooks) for hooks in registries]
    own = [[key for key, hook in hooks.items() if _is_engines(hook)] for hooks in kept]
    for hooks, keys in zip(registries, own, strict=True):
        for key in keys:
            del hooks[key]
    try:
        before, after = ([kept[i][key] for key in own[i]] for i in range(2))
        yield before, after
    finally:
        for hooks, old, keys in zip(registries, kept, own, strict=True):
            _put_back(hooks, old, keys)


def _put_back(hooks: dict[int, Any], old: Mapping[int, Any], keys: list[int]) -> None:
    """Put hooks back where they were; others may have come or gone meanwhile."""
    if not keys:
        return
    present = dict(hooks)
    hooks.clear()
    hooks.update((key, hook) for key, hook in old.items() if key in present or key in keys)
    hooks.update(present)


def with_engine_around(
    module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of `run(*args, **kwargs)`, with the engine's hooks around it instead of
    around the module's own forward."""
    if not has_engine(module):
        return run(*args, **kwargs)
    with engine_off(module) as (before, after):
        for hook in before:
            found = hook(module, args, kwargs)
            if found is not None:
                args, kwargs = found
        output = run(*args, **kwargs)
        for hook in after:
            found = hook(module, args, output)
            output = output if found is None else found
        return output


@contextmanager
def as_in_forward(module: Any) -> Iterator[None]:
    """Let a module be inside as its engine has it in its forward: without the engine's hooks, and
    with whole parameters. All ranks that share the parameters enter."""
    if not has_engine(module):
        yield
        return
    gathers = hasattr(module, "unshard")
    if gathers:
        module.unshard()
    try:
        with engine_off(module):
            yield
    finally:
        if gathers:
            module.reshard()


def sharded_parts(module: nn.Module) -> list[str]:
    """Return the names of the sub-modules that an engine gathers by themselves, innermost ones."""
    names = [name for name, one in module.named_modules() if name and has_engine(one)]
    return [name for name in names if not any(one.startswith(f"{name}.") for one in names)]

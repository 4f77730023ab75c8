"""Which sub-modules of a module that cannot be captured may be planned by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memopt.errors import CaptureError, NothingToTrainError
from memopt.torch_private.modules import call_goes_elsewhere

_SHOWN = 4
_PASSES_ON = ("torch.", "transformers.modeling_layers")
"""Modules whose classes' `__call__` changes nothing; that of Hugging Face's layers (transformers 4)
may checkpoint."""


def calling_class(module: nn.Module) -> type | None:
    """Return the class that gives a module a `__call__` of its own, around or in place of
    `nn.Module`'s, the only one that asks memopt; None if no class does, or it passes calls on."""
    for kind in type(module).__mro__:
        own = vars(kind).get("__call__")
        if own is not None:
            return None if getattr(own, "__module__", "").startswith(_PASSES_ON) else kind
    return None


def check_call(module: nn.Module) -> None:
    """Check that each call of a module asks for its plan once.

    Raises:
        ValueError: its calls go elsewhere already, or its class has a `__call__` of its own.
    """
    if call_goes_elsewhere(module):
        raise ValueError(
            "the model's calls are taken already: in place of model.compile() take "
            "torch.compile(model) of the wrapped model, and wrap it once (memopt.unwrap(model) "
            "undoes it)"
        )
    kind = calling_class(module)
    if kind is not None:
        raise ValueError(
            f"{kind.__name__} has a __call__ of its own, which would run around the plan of the "
            "whole call, or without asking for one: use memopt.plan(model, inputs, budget=...)"
            ".apply(model), which plans what this __call__ does, too, or wrap the sub-module that "
            "it calls, or a module whose forward calls it"
        )


def called_below(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's sub-modules that code may call, with their names in the whole model: its
    children, and of a container (a ModuleList) or a class with a `__call__` of its own those
    inside."""
    for inner, child in module.named_children():
        full = f"{name}.{inner}" if name else inner
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if type(child).forward is nn.Module.forward or calling_class(child) is not None:
            yield from called_below(full, child)
        else:
            yield full, child


def is_worthwhile(module: nn.Module) -> bool:
    """Return whether a plan may have something to decide in a module: it is neither a layer of
    torch's nor one with as few parameters."""
    if isinstance(module, nn.RNNBase) or any(True for _ in module.children()):
        return True
    own = sum(1 for _ in module.parameters(recurse=False))
    return own > 2 and not type(module).__module__.startswith("torch.nn.")


def names_of_parts(model: nn.Module, failing: Iterable[str]) -> list[str]:
    """Return the names of the largest sub-modules around those in which a capture failed, but for
    those that hold another module of the innermost one's class."""
    inside = {"", *failing}
    innermost = type(model.get_submodule(max(inside, key=len)))

    return [
        name
        for one in sorted(inside)
        for name, child in called_below(one, model.get_submodule(one))
        if name not in inside and is_worthwhile(child)
        if innermost not in map(type, child.modules())
    ]


@contextmanager
def naming_parts(model: nn.Module | None) -> Iterator[None]:
    """Plan a model inside; if it cannot be captured, add to the error the names of parts that may
    be."""
    try:
        yield
    except NothingToTrainError:
        raise
    except CaptureError as error:
        if model is None or isinstance(model, torch.jit.ScriptModule):
            raise
        names = names_of_parts(model, error.modules)
        if not names:
            raise
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        refused = CaptureError(
            f'{error}. memopt.wrap(model, ..., parts="auto") plans the largest sub-modules around '
            f"it within the budget ({shown})"
        )
        refused.modules = error.modules
        raise refused from error

"""Makes a custom autograd function of a user's function, whose backward runs it once more."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.errors import ExecutionError
from memopt.torch_private import pytree
from memopt.user_code.opaque import Function
from memopt.user_code.own_backward import leaves_behind


def as_autograd_function(function: Callable[..., Any]) -> Function:
    """Make the autograd function: `apply(names of the keyword arguments, *all arguments)`."""
    name = str(getattr(function, "__qualname__", type(function).__name__))

    def run(names: Sequence[str], values: Sequence[Any]) -> Any:
        count = len(values) - len(names)
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    class Recomputing(torch.autograd.Function):
        is_run_again = True

        @staticmethod
        def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
            ctx.names = names
            ctx.are_tensors = tuple(isinstance(one, Tensor) for one in values)
            ctx.others = tuple(one for one in values if not isinstance(one, Tensor))
            ctx.save_for_backward(*(one for one in values if isinstance(one, Tensor)))
            states, others = _random_states(values), _other_states()
            found = run(names, values)
            same = all(map(torch.equal, states, _random_states(values)))
            if not same or others != _other_states():
                raise ExecutionError(
                    f"{name}, which is opaque, draws random numbers, and its backward would draw "
                    "others: make it a torch.autograd.Function, which saves what it has drawn"
                )
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
            values = [next(tensors if one else others) for one in ctx.are_tensors]
            for i, needed in enumerate(ctx.needs_input_grad[1:]):
                if needed:
                    values[i] = values[i].detach().requires_grad_()
            wanted = [one for one in values if isinstance(one, Tensor) and one.requires_grad]
            with torch.enable_grad():
                found = run(ctx.names, values)
            outputs = found if isinstance(found, (tuple, list)) else (found,)
            pairs = [
                (one, gradient)
                for one, gradient in zip(outputs, gradients, strict=True)
                if isinstance(one, Tensor) and one.requires_grad and gradient is not None
            ]
            arguments = {id(one) for one in wanted}
            if any(id(leaf) not in arguments for leaf in leaves_behind([one for one, _ in pairs])):
                raise ExecutionError(
                    f"{name}, which is opaque, reads a parameter that is not among its arguments, "
                    "and which would get no gradient: pass it"
                )
            computed: Iterable[Any] = [None] * len(wanted)
            if pairs:
                results, given = zip(*pairs, strict=True)
                computed = torch.autograd.grad(results, wanted, given, allow_unused=True)
            by_value = {id(one): gradient for one, gradient in zip(wanted, computed, strict=True)}
            return None, *(by_value.get(id(one)) for one in values)

    Recomputing.__name__ = re.sub(r"\W+", "_", name).strip("_")
    Recomputing.__qualname__, Recomputing.__module__ = name, str(function.__module__)
    return Recomputing


def _random_states(values: Sequence[Any]) -> list[Tensor]:
    """Return the states of the default generators that code on these tensors may draw from."""
    tensors = [one for one in pytree.tree_leaves(list(values)) if isinstance(one, Tensor)]
    devices = {one.device for one in tensors if one.device.type not in ("cpu", "meta")}
    modules = [(torch.get_device_module(one), one) for one in sorted(devices, key=str)]
    return [torch.get_rng_state(), *(module.get_rng_state(one) for module, one in modules)]


def _other_states() -> tuple[Any, bytes]:
    """Return the states of Python's and NumPy's default generators."""
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    return random.getstate(), pickle.dumps(of_numpy)

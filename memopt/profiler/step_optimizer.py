"""One optimizer step, cut into one update per parameter.

An update narrows the optimizer's `param_groups` to one parameter, with that group's options as
they are at that moment (so learning-rate schedulers work), and calls `step()`. This is the
ordinary step, bit for bit, for optimizers that treat every parameter on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

PER_PARAMETER = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)
"""Optimizers whose step can be cut into one update per parameter."""


class Update:
    """The target of update operators: `update(name, gradient)` updates one parameter;
    `update(name, gradient, value)` one that the forward has given a value, which it takes first.

    Attributes:
        run: what it does; set while a train step runs, None otherwise.
    """

    __name__ = "update"
    __module__ = "memopt"

    def __init__(self) -> None:
        self.run: Callable[[str, torch.Tensor, torch.Tensor | None], None] | None = None

    def __call__(
        self, name: str, gradient: torch.Tensor, value: torch.Tensor | None = None
    ) -> None:
        """Update the parameter of that name in the captured step."""
        if self.run is None:
            raise RuntimeError("memopt: a parameter update outside a train step")
        self.run(name, gradient, value)

    def __str__(self) -> str:
        return "update"


def check_splittable(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse what cannot be cut into one update per parameter.

    Raises:
        ValueError: another optimizer class, hooks on the optimizer or on a gradient, parameters
            of another model; the message names it and the remedy.
    """
    kind = type(optimizer)
    if kind not in PER_PARAMETER:
        known = ", ".join(one.__name__ for one in PER_PARAMETER)
        raise ValueError(
            f"{kind.__name__} cannot be cut into one update per parameter (closures, norms across "
            f"parameters, unknown rules); train steps take {known}. Plan without loss_fn=, or give "
            "the optimizer's name, to plan the module alone"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"{kind.__name__} has step hooks, which would run once per parameter; remove them"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError(f"{kind.__name__}(differentiable=True) has no place in a train step")
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ValueError(
                f"{kind.__name__} trains a tensor that is no parameter of the model; give each "
                "model its own optimizer, and make a loss that has parameters a part of the model "
                "(a module that holds both and returns the loss, with loss_fn=lambda loss: loss)"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has gradient hooks, which planned updates would not call")


def update_one(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Step one parameter, leaving the optimizer's groups as they were."""
    groups = optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    # What is changed in place keeps the layout of the parameter, as autograd's own .grad would.
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    state = optimizer.state.get(parameter)
    before = None if state is None else dict(state)
    touch = Touch(optimizer, parameter)
    try:
        parameter.grad = gradient
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.step()
    except BaseException:
        # State made in part would never be completed.
        if before is None and not touch.changed():
            optimizer.state.pop(parameter, None)
        elif state is not None and before is not None:
            state.clear()
            state.update(before)
        raise
    finally:
        optimizer.param_groups = groups
        parameter.grad = None


class Touch:
    """Tells whether an update that failed has changed its parameter, or state that was there
    before, in place."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        state = optimizer.state.get(parameter) or {}
        held = [value for value in state.values() if isinstance(value, torch.Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in (parameter, *held)]
        # Fused kernels do not count versions.
        self._fused = any(group.get("fused") for group in optimizer.param_groups)

    def changed(self) -> bool:
        """Whether it has, or could have without a trace."""
        return self._fused or any(tensor._version != seen for tensor, seen in self._versions)


@contextmanager
def optimizer_restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put parameters, their gradients and the optimizer's state back afterwards, in place."""
    parameters = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    states: dict[torch.Tensor, dict[str, tuple[Any, Any]]] = {
        parameter: {
            key: (value, value.clone() if isinstance(value, torch.Tensor) else value)
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in parameters:
                parameter.copy_(value)
                parameter.grad = gradient
            for stepped in list(optimizer.state):
                if stepped not in states:
                    del optimizer.state[stepped]
            for key_tensor, saved in states.items():
                optimizer.state[key_tensor] = {
                    key: _put_back(tensor, copy) for key, (tensor, copy) in saved.items()
                }


def _put_back(value: Any, copy: Any) -> Any:
    return value.copy_(copy) if isinstance(value, torch.Tensor) else copy

"""Lets an optimizer step many parameters of a CPU by its foreach form, if that has the same bits.

On a CPU an optimizer steps its parameters one after the other by default, each by many operators
that Python calls. Its foreach form calls each operator once for all parameters, and applies it to
one after the other inside: the same arithmetic, if both forms list it in the same order, in less
memory, since more of it is in place. That is tried on stand-in parameters, once for each class of
optimizer, dtype and choice of options that may change the order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt.step.trial import equal_bytes
from memopt.torch_private.modes import nobody_looks_on

_TAKES_MORE = (torch.optim.Adagrad,)
"""Optimizers whose foreach form takes more memory than the updates of its parameters together."""
_SHAPES = ((67, 5), (129,), (1,), ())
_STEPS = 3


def foreach_options(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], parameters: list[torch.Tensor]
) -> dict[str, Any]:
    """Return the options with which an optimizer steps parameters of a group together."""
    if group.get("foreach", False) is not None or group.get("fused") or kind in _TAKES_MORE:
        return {}
    if not nobody_looks_on():
        # Below a mode the foreach form counts no versions, by which a failed update is known.
        return {}
    if {*map(type, parameters)} != {nn.Parameter}:
        return {}
    if any(device.type != "cpu" for device in {parameter.device for parameter in parameters}):
        return {}
    dtypes = {parameter.dtype for parameter in parameters}
    return {"foreach": True} if all(_alike(kind, group, dtype) for dtype in dtypes) else {}


_known: dict[Any, bool] = {}


def _alike(kind: type[torch.optim.Optimizer], group: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return whether an optimizer's two forms give the same bits with options of this kind."""
    options = {name: value for name, value in group.items() if name != "params"}
    key = kind, dtype, tuple((name, _form(value)) for name, value in options.items())
    if key not in _known:
        plain = dtype.is_floating_point and not any(map(_is_tensor, options.values()))
        _known[key] = plain and _tried(kind, options, dtype)
    return _known[key]


def _is_tensor(value: Any) -> bool:
    return any(map(_is_tensor, value)) if isinstance(value, tuple) else torch.is_tensor(value)


def _form(value: Any) -> Any:
    """Return the part of an option that can decide which operators run: whether a number is
    zero."""
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return type(value), bool(value) if isinstance(value, (bool, int, float)) else str(value)


def _tried(kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [
            torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in _SHAPES
        ]

    values, gradients = drawn(), [drawn() for _ in range(_STEPS)]
    found = []
    for foreach in (False, True):
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizer = kind(parameters)  # type: ignore[call-arg]  # those known have a default lr
        optimizer.param_groups[0].update({**options, "foreach": foreach})
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        states = (optimizer.state[parameter].values() for parameter in parameters)
        found.append([*parameters, *(one for state in states for one in state if _is_tensor(one))])
    return len(found[0]) == len(found[1]) and all(map(equal_bytes, *found))

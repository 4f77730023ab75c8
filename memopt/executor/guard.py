"""The one guard at the door of a planned module: is this call the one that was planned?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.errors import GuardError
from memopt.profiler.inputs import Call


def _describe(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    return ("value", type(value), value)


def _text(description: tuple[Any, ...]) -> str:
    if description[0] == "tensor":
        _, shape, stride, dtype, device, grad = description
        suffix = ", requires_grad" if grad else ""
        name = str(dtype).removeprefix("torch.")
    return f"{name}{list(shape)} stride {stride} on {device}{suffix}"
    return repr(description[2])


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


@dataclass(frozen=True)
class Guard:
    """What a plan was made for.

    Attributes:
        spec: structure of the arguments.
        leaves: description of every flat argument.
        training: name → training flag of every sub-module.
        parameters: name → description of every parameter and buffer.
        autocast: enabled autocast dtypes.
    """

    spec: Any
    leaves: tuple[tuple[Any, ...], ...]
    training: tuple[tuple[str, bool], ...]
    parameters: tuple[tuple[str, tuple[Any, ...]], ...]
    autocast: tuple[Any, ...]

    @staticmethod
    def of(model: nn.Module, call: Call) -> Guard:
        """The guard of a model and its example call, as they are now."""
        return Guard(
            spec=call.spec,
            leaves=tuple(_describe(leaf) for leaf in call.leaves),
            training=tuple((name, m.training) for name, m in model.named_modules()),
            parameters=tuple((n, _describe(p)) for n, p in model.named_parameters())
            + tuple((n, _describe(b)) for n, b in model.named_buffers()),
            autocast=_autocast(),
        )

    def evaluating(self, model: nn.Module) -> bool:
        """Whether this call is evaluation: no gradients wanted, or the model put in eval mode."""
        if not torch.is_grad_enabled():
            return True
        return dict(self.training).get("", True) and not model.training

    def check(self, model: nn.Module, call: Call) -> None:
        """Raise GuardError, naming both sides, unless the call is the planned one."""
        remedy = "plan again for this call (memopt.plan), or call the original module"
        if call.spec != self.spec:
            raise GuardError(
                f"the plan was made for other arguments: planned {self.spec}, got {call.spec}; "
                + remedy
            )
        for i, (leaf, planned) in enumerate(zip(call.leaves, self.leaves, strict=True)):
            found = _describe(leaf)
            if found != planned:
                raise GuardError(
                    f"argument {i}: planned {_text(planned)}, got {_text(found)}; {remedy}"
                )
        self._check_model(model, remedy)

    def _check_model(self, model: nn.Module, remedy: str) -> None:
        modules = dict(model.named_modules())
        for name, training in self.training:
            if name not in modules or modules[name].training != training:
                mode = "train" if training else "eval"
                raise GuardError(
                    f"module {name or 'model'!r}: planned in {mode} mode, found otherwise; {remedy}"
                )
        found = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, planned in self.parameters:
            if name not in found:
                raise GuardError(f"parameter or buffer {name!r} is gone; {remedy}")
            description = _describe(found[name])
            if description != planned:
                raise GuardError(
                    f"{name}: planned {_text(planned)}, got {_text(description)}; {remedy}"
                )
        if _autocast() != self.autocast:
            raise GuardError(f"autocast: planned {self.autocast}, got {_autocast()}; {remedy}")

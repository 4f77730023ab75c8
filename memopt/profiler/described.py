"""A value as a guard compares it: a tensor by what decides its kernels, others by themselves."""

from __future__ import annotations

from typing import Any

import torch


def described(value: Any) -> tuple[Any, ...]:
    """What must be equal for two values to be the same to a captured graph."""
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    # NaN is no reason to refuse: it is compared by its text.
    return ("value", type(value), value if value == value else repr(value))


def described_text(description: tuple[Any, ...]) -> str:
    """A description for people."""
    if description[0] == "tensor":
        _, shape, stride, dtype, device, grad = description
        suffix = ", requires_grad" if grad else ""
        name = str(dtype).removeprefix("torch.")
        return f"{name}{list(shape)} stride {stride} on {device}{suffix}"
    return repr(description[2])

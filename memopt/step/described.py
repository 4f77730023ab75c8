"""Compares what a step read when it was captured with what is there now, by what a graph knows of
it."""

from __future__ import annotations

from typing import Any

import torch


def same(found: Any, planned: Any) -> bool:
    """Return whether two values are the same to a trace. Signed zeros differ; NaN equals NaN."""
    if found is planned:
        return True
    if type(found) is not type(planned):
        return False
    if isinstance(found, (float, complex)):
        return repr(found) == repr(planned)
    if isinstance(found, (list, tuple)):
        return len(found) == len(planned) and all(map(same, found, planned))
    if isinstance(found, torch.Tensor):
        return described(found) == described(planned)
    try:
        return bool(found == planned)
    except (RuntimeError, ValueError):  # tensors or arrays, inside
        return False


def has(owner: Any, name: str) -> bool:
    """Return whether an object has an attribute. A property is not run (it may write, as does a
    spectral norm's weight, and what it reads has guards of its own)."""
    return isinstance(getattr(type(owner), name, None), property) or hasattr(owner, name)


def described(value: Any) -> tuple[Any, ...]:
    """Return the properties in which two values must agree to be the same to a captured graph."""
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            tuple(value.shape),
            value.stride() if value.layout is torch.strided else str(value.layout),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    # NaN is compared by its text, so that it equals itself.
    return ("value", type(value), value if value == value else repr(value))


def described_text(description: tuple[Any, ...]) -> str:
    """Return a description as a text for people."""
    if description[0] == "tensor":
        _, shape, stride, dtype, device, grad = description
        suffix = ", requires_grad" if grad else ""
        name = str(dtype).removeprefix("torch.")
        return f"{name}{list(shape)} stride {stride} on {device}{suffix}"
    return repr(description[2])

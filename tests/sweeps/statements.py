"""A statement of a random module, and short ways to write one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PRELUDE = """
import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * ctx.scale, None


class Cube(torch.autograd.Function):
    # In the newer style, keeping its result.
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, gradient):
        x, cubed = ctx.saved_tensors
        return 3 * x * x * gradient + 0 * cubed


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Doubling(torch.autograd.Function):
    # In place.
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Halves(torch.autograd.Function):
    # Two results, of which one may have no gradient.
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x.cos() - second * x.sin()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2
"""


@dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        body: lines of `forward`, the last of which gives `{t}`; operands by role, their sizes as
            `{a0}`, `{a1}`..., `{a_last}`; `{c}` a number, `{p}` a rate, `{k}` 1 to 3.
        setup: lines of `__init__`, about `{m}`.
        operands: role → whether a value suits, given those of the roles before.
    """

    body: tuple[str, ...]
    setup: tuple[str, ...]
    operands: dict[str, Callable[..., bool]]


def real(v: Any, *_: Any) -> bool:
    return bool(v.is_floating_point()) and v.dim() > 0


def same(v: Any, first: Any, *_: Any) -> bool:
    return bool(v.shape == first.shape and v.dtype == first.dtype)


def dims(*wanted: int) -> Callable[..., bool]:
    return lambda v, *_: real(v) and v.dim() in wanted and str(v.dtype) == "torch.float32"


def floats(v: Any, *_: Any) -> bool:
    return real(v) and str(v.dtype) == "torch.float32"


def ids(v: Any, *_: Any) -> bool:
    return str(v.dtype) == "torch.int64" and v.dim() == 2


def of_one(texts: str, on: Callable[..., bool] = floats) -> list[Line]:
    """Expressions of one value, one a line."""
    return [Line(("{t} = " + text.strip(),), (), {"a": on}) for text in _lines(texts)]


def of_two(texts: str, on: Callable[..., bool] = floats) -> list[Line]:
    """Expressions of two values of one shape, one a line."""
    return [Line(("{t} = " + text.strip(),), (), {"a": on, "b": same}) for text in _lines(texts)]


def _lines(texts: str) -> list[str]:
    return [line for line in texts.splitlines() if line.strip()]


def with_setup(setup: str, text: str = "{m}({a})", on: Callable[..., bool] = floats) -> Line:
    setups = tuple(s.strip() for s in setup.split(";"))
    return Line(
        ("{t} = " + text,), tuple("{m} = " * (i == 0) + s for i, s in enumerate(setups)), {"a": on}
    )


def several(*body: str, on: Callable[..., bool] = floats, setup: tuple[str, ...] = ()) -> Line:
    return Line(body, setup, {"a": on})

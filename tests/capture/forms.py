"""Forwards that cannot be captured, and what takes their place, for `test_remedies.py`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import memopt

GENERATOR = torch.Generator()
Form = Callable[["Net", Tensor], Any]


def into_another_order(m: Net, x: Tensor) -> Tensor:
    """Writes to a tensor in another order."""
    with torch.no_grad():
        out = torch.empty(3, x.shape[0]).t()
        torch.mm(x, m.linear.weight.t(), out=out)
    return m.linear(x) * out


def copied(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(3, x.shape[0]).t()
        out.copy_(torch.mm(x, m.linear.weight.t()))
    return m.linear(x) * out


def enlarged(x: Tensor, **how: Any) -> Tensor:
    return x + nn.functional.interpolate(x[None, None], **how)[0, 0, :2, :3]


def causal(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[0])


CAUSAL = memopt.opaque(causal)


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.linear, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.table, self.numbers = np.ones(2), np.ones(2).tolist()
        self.register_buffer("tables", torch.ones(2))
        self.register_buffer("plain", torch.ones(3))
        self.buffer = nn.Buffer(torch.ones(3))
        layer = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.drawn, self.random = np.random.default_rng(0), random.Random(0)
        self.options: dict[str, float] = Attributes(scale=2.0)

    def forward(self, x: Tensor) -> Any:
        y = self.form(self, x)
        return self.linear(y) if isinstance(y, Tensor) else y

    def to_dtype_of(self, x: Tensor) -> Tensor:
        self.buffer = self.buffer.to(x.dtype)
        return x + self.buffer

    def counted(self, x: Tensor) -> Tensor:
        """Replaces a buffer beside a shape that no trace knows."""
        self.plain = self.plain * 0.9 + x.detach().mean()
        return x * x.unique().numel() + self.plain

    def averaged(self, x: Tensor) -> Tensor:
        self.plain = self.plain * 0.9 + x.detach().mean()
        return x + self.plain

    def to_dtype_of_plain(self, x: Tensor) -> Tensor:
        self.plain = self.plain.to(x.dtype)
        return x + self.plain

    def move(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.copy_(self.slow.weight * 0.9 + self.linear.weight * 0.1)
        return x - self.slow(x)

    def put(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[torch.arange(2) < 1] = self.linear(x)[:1] * 2
        return y

    def spread(self, x: Tensor) -> Tensor:
        return torch.where((torch.arange(2) < 1)[:, None], self.linear(x) * 2, self.linear(x))

    def fill(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        above = y > 0
        y[above] = x[above]
        return y

    def record(self, x: Tensor) -> Tensor:
        record = torch.profiler.record_function("linear")
        record.__enter__()
        result: Tensor = self.linear(x)
        record.__exit__(None, None, None)
        return result

    def recorded(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("linear"):
            result: Tensor = self.linear(x)
        return result

    def step_aside(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=str)
        thread.start()
        return x


NOTHING = None


def missing(_model: nn.Module, x: Tensor) -> Tensor:
    try:
        return x if NOT_THERE else x * 2  # type: ignore[name-defined]
    except NameError:
        return x

"""What a sweep runs: one operator between two trained layers, its input in a chosen layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LAYOUTS = ("contiguous", "transposed", "slice", "permuted", "expanded", "channels_last")

FORMS: dict[str, tuple[int, ...]] = {
    "any": (2, 4, 5, 6),
    "image": (2, 4, 6, 6),
    "big_image": (2, 4, 12, 10),
    "volume": (2, 4, 4, 4, 4),
    "sequence": (2, 4, 12),
    "rows": (6, 8),
    "square": (2, 4, 4),
    "vector": (12,),
    "heads": (2, 4, 6, 8),
}
"""Shapes of an operator's input."""

DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda x: x * 2,
    "positive": lambda x: x.abs() + 0.5,
    "above one": lambda x: x.abs() + 1.5,
    "unit": lambda x: x.sigmoid() * 0.9 + 0.05,
    "small": lambda x: x.tanh() * 0.9,
}
"""Where the values of an operator's input lie."""


@dataclass(frozen=True)
class Entry:
    """An operator: `run(h, g, k)` of a tensor, a second one of the same shape, and a Kit.

    Attributes:
        run: the operator; its result may be a tensor or a tuple of tensors.
        form: key of FORMS.
        domain: key of DOMAINS.
    """

    run: Callable[[Tensor, Tensor, Any], Any]
    form: str = "any"
    domain: str = "real"


Table = dict[str, Entry]


class Kit(nn.Module):
    """Parameters and constants that an operator asks for; made at the first request."""

    def param(self, name: str, *shape: int) -> Tensor:
        """A trained tensor."""
        if not hasattr(self, name):
            flat = torch.linspace(-1, 1, math.prod(shape)).cos() - 0.4
            self.register_parameter(name, nn.Parameter(flat.reshape(shape)))
        return getattr(self, name)  # type: ignore[no-any-return]

    def ints(self, name: str, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        if not hasattr(self, name):
            self.register_buffer(name, (torch.arange(math.prod(shape)) * 7 % high).reshape(shape))
        return getattr(self, name)  # type: ignore[no-any-return]

    def bools(self, name: str, *shape: int) -> Tensor:
        """A mask."""
        if not hasattr(self, name):
            self.register_buffer(name, (torch.arange(math.prod(shape)) % 3 == 0).reshape(shape))
        return getattr(self, name)  # type: ignore[no-any-return]

    def layer(self, name: str, make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
        """A module."""
        if not hasattr(self, name):
            self.add_module(name, make(*args, **kwargs))
        return getattr(self, name)


def dense_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor without gaps that is looked at as `layout`."""
    if layout == "transposed" and len(shape) > 1:
        return (*shape[:-2], shape[-1], shape[-2])
    if layout == "slice" or (layout == "transposed" and len(shape) == 1):
        return (*shape[:-1], 2 * shape[-1])
    if layout == "permuted":
        return shape[::-1]
    if layout == "expanded":
        return (1, *shape[1:]) if len(shape) > 1 else (1,)
    if layout == "channels_last" and len(shape) == 2:
        return (2 * shape[0], shape[1])
    return shape


def laid_out(layout: str, dense: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The dense tensor looked at in a layout, with a shape."""
    if layout == "transposed" and len(shape) > 1:
        return dense.transpose(-1, -2)
    if layout == "slice" or (layout == "transposed" and len(shape) == 1):
        return dense[..., ::2]
    if layout == "permuted":
        return dense.permute(tuple(range(len(shape)))[::-1])
    if layout == "expanded":
        return dense.expand(shape)
    if layout == "channels_last" and len(shape) == 2:
        return dense[::2]
    if layout == "channels_last" and len(shape) > 2:
        return dense.movedim(1, -1).contiguous().movedim(-1, 1)
    return dense


class Subject(nn.Module):
    """A layer, the operator, a scaling; the result laid out plainly."""

    def __init__(self, entry: Entry, layout: str) -> None:
        super().__init__()
        self.entry, self.layout = entry, layout
        self.other_layout = "contiguous" if layout in ("transposed", "expanded") else layout
        self.shape = FORMS[entry.form]
        self.dense = dense_shape(layout, self.shape)
        self.other_dense = dense_shape(self.other_layout, self.shape)
        self.before = nn.Linear(6, max(1, math.prod(self.dense) // 2))
        self.other = nn.Linear(6, max(1, math.prod(self.other_dense) // 2))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.kit = Kit()
        with torch.no_grad(), torch.random.fork_rng():
            self(inputs())  # the Kit makes what it is asked for

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        h = self._input(self.before, x, self.layout, self.dense)
        g = self._input(self.other, x + 0.1, self.other_layout, self.other_dense)
        result = self.entry.run(h, g, self.kit)
        return tuple(self._plain(value) for value in pytree.tree_leaves(result))

    def _input(self, layer: nn.Module, x: Tensor, layout: str, dense: tuple[int, ...]) -> Tensor:
        x = x if math.prod(dense) > 1 else x[:1]
        flat = DOMAINS[self.entry.domain](layer(x))
        return laid_out(layout, flat.view(dense), self.shape)

    def _plain(self, value: Tensor) -> Tensor:
        """A result after the last layer: scaled, transposed where the input was, flattened."""
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.is_floating_point():
            value = value * self.scale
        if self.layout == "transposed" and value.dim() > 1:
            value = value.transpose(-1, -2)
        return value.flatten() if value.is_floating_point() else value.clone()


class Together(nn.Module):
    """Several subjects as one model, which is captured and planned once."""

    def __init__(self, subjects: list[Subject]) -> None:
        super().__init__()
        self.subjects = nn.ModuleList(subjects)

    def forward(self, x: Tensor) -> list[Any]:
        return [subject(x) for subject in self.subjects]


def inputs() -> Tensor:
    """The input of every subject."""
    return torch.linspace(-1.5, 1.5, 12).reshape(2, 6).sin() + 0.3

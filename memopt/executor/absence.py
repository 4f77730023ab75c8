"""Kernels that a backward skips when some outputs get no gradient, and the values used instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from memopt.step.signature import values_of

NEUTRAL = -0.0
"""Adding it to a floating-point number changes no bit, not even the sign of zero."""


@dataclass(frozen=True)
class Uncomputed:
    """The part of a backward that is not computed.

    Attributes:
        nodes: kernel calls that depend only on gradients that the outputs do not get.
        fills: tensor of such a call → the number that it is filled with; `NEUTRAL` where it has
            no entry.
    """

    nodes: frozenset[Node] = frozenset()
    fills: Mapping[int, float] = field(default_factory=dict)

    def number(self, tensor: int | None) -> float:
        """Return the number that a tensor is filled with."""
        return NEUTRAL if tensor is None else self.fills.get(tensor, NEUTRAL)

    def result(self, node: Node, held: tuple[int | None, ...]) -> Result:
        """Return the values that replace the results of a skipped kernel call."""
        likes = tuple(
            Like.of(v, self.number(t)) if isinstance(v, torch.Tensor) else None
            for v, t in zip(values_of(node), held, strict=True)
        )
        return Result(likes, isinstance(node.meta["val"], (tuple, list)))


NOTHING_ABSENT = Uncomputed()


@dataclass(frozen=True)
class Like:
    """The layout of a tensor all of whose elements are one number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    number: float

    @staticmethod
    def of(value: torch.Tensor, number: float) -> Like:
        """Take the layout from a (fake) tensor."""
        return Like(tuple(value.shape), value.stride(), value.dtype, value.device, number)

    def made(self) -> torch.Tensor:
        """Make a new tensor."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return self.written(made)

    def written(self, into: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with the number and return it."""
        number = complex(self.number, self.number) if self.dtype.is_complex else self.number
        return into.fill_(number)


@dataclass(frozen=True)
class Result:
    """The results of a kernel call that is skipped."""

    likes: tuple[Like | None, ...]
    several: bool

    def __call__(self) -> Any:
        """Return the results in new memory."""
        made = [None if like is None else like.made() for like in self.likes]
        return made if self.several else made[0]

    def into(self, *given: torch.Tensor) -> None:
        """Write the results into the given tensors."""
        for like, tensor in zip(self.likes, given, strict=True):
            if like is not None:
                like.written(tensor)

    def over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write the only result over a tensor."""
        (like,) = self.likes
        assert like is not None
        return like.written(tensor)

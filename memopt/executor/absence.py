"""What a backward does not compute because some outputs get no gradient, and what stands there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from memopt.step.signature import values_of

NEUTRAL = -0.0
"""Added to a number of floating point it changes no bit of it, the sign of zero included."""


@dataclass(frozen=True)
class Uncomputed:
    """What a backward does not compute.

    Attributes:
        nodes: what depends on nothing but gradients that outputs do not get.
        fills: the tensor of such a node → the number that it is filled with where it is not
            `NEUTRAL`.
    """

    nodes: frozenset[Node] = frozenset()
    fills: Mapping[int, float] = field(default_factory=dict)

    def number(self, tensor: int | None) -> float:
        """What a tensor is filled with."""
        return NEUTRAL if tensor is None else self.fills.get(tensor, NEUTRAL)

    def result(self, node: Node, held: tuple[int | None, ...]) -> Result:
        """What stands for the results of an absent kernel call.

        Args:
            node: the call.
            held: the tensors that it writes.
        """
        likes = tuple(
            Like.of(v, self.number(t)) if isinstance(v, torch.Tensor) else None
            for v, t in zip(values_of(node), held, strict=True)
        )
        return Result(likes, isinstance(node.meta["val"], (tuple, list)))


NOTHING_ABSENT = Uncomputed()


@dataclass(frozen=True)
class Like:
    """A tensor that holds one number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    number: float

    @staticmethod
    def of(value: torch.Tensor, number: float) -> Like:
        """One with the layout of a (fake) tensor."""
        return Like(tuple(value.shape), value.stride(), value.dtype, value.device, number)

    def made(self) -> torch.Tensor:
        """A new tensor."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return self.written(made)

    def written(self, into: torch.Tensor) -> torch.Tensor:
        """The number in all elements of a tensor."""
        number = complex(self.number, self.number) if self.dtype.is_complex else self.number
        return into.fill_(number)


@dataclass(frozen=True)
class Result:
    """What a call returns that is not made.

    Attributes:
        likes: the tensors; None where it returns none.
        several: whether it returns several.
    """

    likes: tuple[Like | None, ...]
    several: bool

    def __call__(self) -> Any:
        """The result, in new memory."""
        made = [None if like is None else like.made() for like in self.likes]
        return made if self.several else made[0]

    def into(self, *given: torch.Tensor) -> None:
        """The result, in these tensors."""
        for like, tensor in zip(self.likes, given, strict=True):
            if like is not None:
                like.written(tensor)

    def over(self, tensor: torch.Tensor) -> torch.Tensor:
        """The result in place of a tensor."""
        (like,) = self.likes
        assert like is not None
        return like.written(tensor)

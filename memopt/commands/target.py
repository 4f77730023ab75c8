"""What a model named on the command line is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class TargetError(Exception):
    """A model named on the command line cannot be made; the message has the remedy."""


@dataclass(frozen=True)
class Target:
    """A model with its example inputs and, if known, its loss."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Sizes:
    """How a Hugging Face model is made; a factory chooses for itself.

    Attributes:
        batch: examples per step.
        sequence: tokens per example.
        meta: without weights, for estimates.
    """

    batch: int = 4
    sequence: int = 128
    meta: bool = False

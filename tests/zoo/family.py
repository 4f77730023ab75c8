"""What a model family of the zoo is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Size: TypeAlias = Literal["tiny", "paper"]
"""tiny: narrow and on small inputs, so that one training step takes well under a second on one
thread. paper: as published; build it under `torch.device("meta")` to capture without its memory."""

Inputs: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]

TINY_BATCH = 4
"""Also the paper size's batch unless told otherwise; batch norm sees several values even where a
feature map has shrunk to one pixel."""


@dataclass(frozen=True)
class Family:
    """One architecture, its inputs and a scalar loss of its output.

    Attributes:
        name: as in tables and test ids.
        make: builds the model at a size, in train mode (the default of every module).
        make_inputs: (size, batch, generator) → positional or keyword arguments of the model.
        loss: scalar of the model's output; needs no targets.
        tags: what to choose families by: "dropout", "batchnorm", "cnn", "transformer", "tied",
            "model-output" (returns a Hugging Face ModelOutput), "aux" (several outputs).
    """

    name: str
    make: Callable[[Size], nn.Module]
    make_inputs: Callable[[Size, int, torch.Generator], Inputs]
    loss: Callable[[Any], Tensor]
    tags: frozenset[str] = frozenset()

    def build(self, size: Size = "tiny", seed: int = 0) -> nn.Module:
        """A new model with the same weights for the same seed; global random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(size)

    def inputs(
        self,
        size: Size = "tiny",
        generator: torch.Generator | None = None,
        batch: int = TINY_BATCH,
    ) -> Inputs:
        """Random inputs on the CPU; the same ones for the same generator state (seed 0 if None)."""
        return self.make_inputs(size, batch, generator or torch.Generator().manual_seed(0))

    def __str__(self) -> str:
        return self.name


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def class_loss(logits: Tensor) -> Tensor:
    """Cross entropy of logits (..., classes) against the fixed classes 0, 1, 2, ..."""
    rows = logits.flatten(0, -2)
    targets = torch.arange(rows.shape[0], device=rows.device) % rows.shape[1]
    return functional.cross_entropy(rows, targets)

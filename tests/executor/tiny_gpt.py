"""A GPT of many layers of tiny tensors, whose step is bound by the host, and what its host does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 64
WIDTH = 32


class Block(nn.Module):
    """A layer: attention, and a network of two products."""

    def __init__(self, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop_1, self.drop_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the input's shape (batch, words, width)."""
        batch, words, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, 2)
        shape = batch, words, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop_1(self.out(y.transpose(1, 2).reshape(x.shape)))
        y = self.down(functional.gelu(self.up(self.norm_2(x))))
        result: Tensor = x + self.drop_2(y)
        return result


class TinyGPT(nn.Module):
    """Many small operators: 5 parameters, and 12 more a layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of words, of shape (batch, words, 64)."""
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch() -> tuple[Tensor, Tensor]:
    """Draw two rows of eight words, and their targets."""
    return torch.randint(0, WORDS, (2, 8)), torch.randint(0, WORDS, (2, 8))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def calls_of(step: Callable[[], object]) -> tuple[int, int]:
    """Count the calls of Python functions, and of functions written in C, that a step makes."""
    counts = {"call": 0, "c_call": 0}

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    # The last one is `sys.setprofile` itself, the first one is the step.
    return counts["call"] - 1, counts["c_call"] - 1

"""Modules that check their input in many ways: in files of tests pytest rewrites assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import torch_compilable_check


class Checking(nn.Module):
    """Checks its input in one of many ways."""

    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.drop, self.check = nn.Linear(16, 16), nn.Dropout(0.3), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.drop(self.linear(x)).relu()


def asserts(x: Tensor) -> None:
    assert (x > -50).all(), "too small"


def raises(x: Tensor) -> None:
    if (x <= -50).any():
        raise ValueError(f"too small: {x.shape}")


def raises_for_one_of_two(x: Tensor) -> None:
    if torch.isnan(x).any() or (x <= -50).any():
        raise ValueError("too small")


def raises_for_a_number(x: Tensor) -> None:
    if (x <= -50).any().item():
        raise ValueError("too small")


def raises_for_a_boolean(x: Tensor) -> None:
    if not bool((x > -50).all()):
        raise ValueError("too small")


def by_torch(x: Tensor) -> None:
    torch._assert_async((x > -50).all(), "too small")


def by_torch_at_once(x: Tensor) -> None:
    torch._assert((x > -50).all(), "too small")


def all_by_torch(x: Tensor) -> None:
    torch._check_tensor_all(x > -50, lambda: "too small")


def by_transformers(x: Tensor) -> None:
    torch_compilable_check((x > -50).all(), "too small")  # as LLaVA does


CHECKS = [
    asserts,
    raises,
    raises_for_one_of_two,
    raises_for_a_number,
    raises_for_a_boolean,
    by_torch,
    by_torch_at_once,
    all_by_torch,
    by_transformers,
]

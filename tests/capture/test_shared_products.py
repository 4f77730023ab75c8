"""A model whose products may be shared in opt_einsum's cache is planned (neuraloperator's)."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import torch
from torch import Tensor, nn

import memopt

_SHARING: dict[int, list[Tensor]] = {}


def currently_sharing() -> bool:
    return threading.get_ident() in _SHARING


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).relu()
        return h if currently_sharing() else torch.einsum("ij,kj->ik", h, h)


def test_products_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("opt_einsum.sharing")
    library.currently_sharing = currently_sharing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opt_einsum.sharing", library)
    model, x = Product(), torch.randn(3, 4)
    plan = memopt.plan(model, x, strategy="rotor", progress=False, cache=False)
    assert torch.equal(plan.apply(model)(x), model(x))

"""Sparse and nested tensors: refused by their names, with remedies that work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError

ADJACENCY = (torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) < 0.3).float()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        return torch.sparse.mm(adjacency, self.linear(x))


class Listed(Graph):
    def forward(self, x: Tensor, adjacency: list[Tensor]) -> Tensor:
        return super().forward(x, adjacency[0])


class Buffered(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", ADJACENCY.to_sparse())

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.edges)


class Kept(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.edges = ADJACENCY.to_sparse()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.edges)


class Makes(Graph):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, ADJACENCY.to(x).to_sparse())


class Gathers(Graph):
    """The product of a sparse matrix by its parts."""

    def forward(self, x: Tensor, at: Tensor, values: Tensor) -> Tensor:  # type: ignore[override]
        found = self.linear(x)[at[1]] * values[:, None]
        return torch.zeros(10, 3).index_add(0, at[0], found)


class Flattened(Graph):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = self.linear(x)
        return result.values() if result.is_nested else result


def _step(model: nn.Module, *args: Any) -> Tensor:
    planned = memopt.wrap(model, budget="min", progress=False, cache=False)
    output: Tensor = planned(*args)
    output.sum().backward()
    assert planned.calls.planned == 1
    return output.detach()


X = torch.ones(10, 6)
SPARSE = ADJACENCY.to_sparse().coalesce()
NESTED = torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (Graph, (X, SPARSE), r"argument 'adjacency' is a sparse tensor \(sparse_coo\)"),
        (Graph, (X, ADJACENCY.to_sparse_csr()), r"'adjacency' is a sparse tensor \(sparse_csr\)"),
        (Listed, (X, [SPARSE]), "argument 'adjacency' is a sparse tensor"),
        (Buffered, (X,), "the parameter or buffer 'edges' is a sparse tensor"),
        (Kept, (X,), r"model\.edges is a sparse tensor"),
        (Makes, (X,), r"what the forward makes at .*ADJACENCY.to\(x\).*is a sparse tensor"),
        (Gathers, (X, SPARSE.indices(), SPARSE.values()), "'values' is a part of a sparse .*clone"),
        (Flattened, (NESTED,), r"argument 'x' is a nested tensor \(jagged\)"),
    ],
)
@pytest.mark.parametrize("cache", [True, False])
def test_it_is_named(model: type[nn.Module], args: Any, message: str, cache: bool) -> None:
    with pytest.raises(CaptureError, match=message):
        memopt.wrap(model(), progress=False, cache=cache)(*args)


def test_the_remedies_work() -> None:
    torch.manual_seed(0)
    model = Graph()
    expected = model(X, SPARSE).detach()
    torch.testing.assert_close(_step(model, X, SPARSE.to_dense()), expected)
    memopt.unwrap(model)
    model.__class__ = Gathers
    parts = SPARSE.indices().clone(), SPARSE.values().clone()
    torch.testing.assert_close(_step(model, X, *parts), expected)
    assert _step(Flattened(), torch.nested.to_padded_tensor(NESTED, 0.0)).shape == (2, 3, 3)

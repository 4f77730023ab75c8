"""Singular values and eigenvalues that need no gradient, computed as eager computes them.

`linalg.svdvals` and its kin (norms by singular values, condition numbers, ranks) ask LAPACK for the
vectors, too, only where a backward will want them; asked for values alone it takes another path,
with other last bits. A tensor that is traced always looks as if it had a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from memopt.profiler.as_eager.operators import CallsThrough, Substitute

_ATEN = torch.ops.aten
_VECTORS: dict[Any, tuple[int, str]] = {
    _ATEN._linalg_svd.default: (2, "compute_uv"),
    _ATEN._linalg_eigh.default: (2, "compute_v"),
}
"""Factorisation → position and name of the argument that asks for vectors."""

_COMPOSED = frozenset(
    {
        "linalg_svdvals",
        "linalg_eigvalsh",
        "linalg_cond",
        "linalg_matrix_norm",
        "linalg_matrix_rank",
        "linalg_norm",
        "norm",
    }
)
"""Names of the functions that ask for vectors if there is a backward."""


class _ValuesAlone(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _VECTORS:
            position, name = _VECTORS[func]
            args, kwargs = args[:position], {**kwargs, name: False}
        return func(*args, **kwargs)


def _without_vectors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function so that factorisations in it make no vectors."""
    with _ValuesAlone():
        return function(*args, **kwargs)


def values_alone(traced: GraphModule) -> None:
    """Let the calls of a dynamo graph whose results need no gradient make no vectors."""
    found = [node for node in traced.graph.nodes if _asks_in_vain(node)]
    for node in found:
        node.target = Substitute(_function(node), _without_vectors)
        node.op = "call_function"
    if found:
        traced.recompile()


def _asks_in_vain(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if getattr(_function(node), "__name__", "") not in _COMPOSED:
        return False
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return not any(isinstance(one, torch.Tensor) and one.requires_grad for one in results)


def _function(node: Node) -> Any:
    return getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target

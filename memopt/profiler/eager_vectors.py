"""Singular values and eigenvalues that need no gradient, computed as eager computes them.

`linalg.svdvals` and its kin (norms by singular values, condition numbers, ranks) ask LAPACK for the
vectors, too, only where a backward will want them; asked for values alone it takes another path,
with other last bits. A tensor that is traced always looks as if it had a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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


class _ValuesAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _VECTORS:
            position, name = _VECTORS[func]
            args, given[name] = args[:position], False
        return func(*args, **given)


@dataclass(frozen=True)
class ValuesAlone:
    """A function called so that factorisations in it make no vectors."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with _ValuesAlone():  # type: ignore[no-untyped-call]  # torch's own
            return self.function(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)


def values_alone(traced: GraphModule) -> None:
    """Let the calls of a dynamo graph whose results need no gradient make no vectors."""
    found = [node for node in traced.graph.nodes if _asks_in_vain(node)]
    for node in found:
        node.target = ValuesAlone(_function(node))
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

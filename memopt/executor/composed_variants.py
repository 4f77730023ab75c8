"""Out variants of kernels without a native `out=` overload, composed of other kernels.

Each follows torch's own implementation of the operator (ATen/native, 2.11 to 2.13) step by step,
with given tensors where that allocates: results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.step.dropout import EAGER_DROPOUT, noise_of, rounded
from memopt.torch_private.operators import aten as _aten


def _copy(x: Tensor, *_: Any, out: Tensor, **__: Any) -> Tensor:
    """Implement clone, _to_copy and the like: `out` has the layout, dtype and memory format."""
    return out.copy_(x)


def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


def _scaled(name: str, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a sum or difference with a number, whose factor torch's `out=` takes by keyword only."""

    def run(x: Tensor, other: float, alpha: float = 1, *, out: Tensor) -> Tensor:
        return operator(x, other, alpha=alpha, out=out)

    run.__name__ = name
    return run


def _fill(_: Any, value: float, *, out: Tensor, **__: Any) -> Tensor:
    return out.fill_(value)


def _zeros(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out.zero_()


def _ones(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out.fill_(1)


def _backward_of(name: str, view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the gradient of a view's input: 0 outside of the view."""

    def run(grad: Tensor, _sizes: list[int], *where: int, out: Tensor) -> Tensor:
        view(out.zero_(), *where).copy_(grad)
        return out

    run.__name__ = name
    return run


def _scatter(name: str, view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a copy of a tensor with another one written into a view of it."""

    def run(x: Tensor, source: Tensor, *where: Any, out: Tensor, **named: Any) -> Tensor:
        view(out.copy_(x), *where, **named).copy_(source)
        return out

    run.__name__ = name
    return run


def _embedding(weight: Tensor, indices: Tensor, _padding: int = -1, *_: Any, out: Tensor) -> Tensor:
    rows = out.view(-1, weight.shape[1])
    torch.index_select(weight, 0, indices.reshape(-1), out=rows)
    return out


def _safe_softmax(x: Tensor, dim: int, dtype: Any = None, *, out: Tensor) -> Tensor:
    """Set rows that are masked whole to 0 (SoftMax.cpp)."""
    torch.softmax(x, dim, dtype, out=out)
    masked = torch.all(x.eq(-float("inf")), dim, keepdim=True)
    return out.masked_fill_(masked, 0.0)


def _dropout(x: Tensor, p: float, _train: bool | None, *, out: Tensor, mask: Tensor) -> Tensor:
    """Drop out in training (Dropout.cpp, native_dropout_cpu), the scale rounded to the dtype."""
    keep = 1.0 - p
    mask.bernoulli_(keep)
    return torch.mul(x, mask, out=out).mul_(rounded(0.0 if keep == 0 else 1.0 / keep, x.dtype))


def _eager_dropout(
    x: Tensor, p: float, _train: bool | None, *, out: Tensor, mask: Tensor
) -> Tensor:
    noise = noise_of(x, p)
    mask.copy_(noise)
    return torch.mul(x, noise, out=out)


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float, *, out: Tensor) -> Tensor:
    return torch.mul(grad, mask, out=out).mul_(scale)


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *more: Any,
    new_mean: Tensor, new_var: Tensor, **results: Tensor,
) -> Tensor:  # fmt: skip
    """Copy the running statistics and update the copies, as the functional form does."""
    new_mean.copy_(mean)
    new_var.copy_(var)
    _aten._native_batch_norm_legit.out(x, weight, bias, new_mean, new_var, *more, **results)
    return results["out"]


def _pool_whole(x: Tensor, size: list[int], *, out: Tensor) -> Tensor:
    return torch.ops.aten.adaptive_avg_pool2d.out(x, size, out=out)  # type: ignore[no-any-return]


Composed = tuple[Callable[..., Any], tuple[str, ...]]
"""The function, and the keyword of each result."""

_ONE = ("out",)

EVERYWHERE: dict[Any, Composed] = {
    _aten.clone.default: (_copy, _ONE),
    _aten._to_copy.default: (_copy, _ONE),
    _aten.mul.Scalar: (torch.mul, _ONE),
    _aten.div.Scalar: (torch.div, _ONE),
    _aten.add.Scalar: (_scaled("add", torch.add), _ONE),
    _aten.sub.Scalar: (_scaled("sub", torch.sub), _ONE),
    _aten.full_like.default: (_fill, _ONE),
    _aten.full.default: (_fill, _ONE),
    _aten.zeros_like.default: (_zeros, _ONE),
    _aten.new_zeros.default: (_zeros, _ONE),
    _aten.zeros.default: (_zeros, _ONE),
    _aten.ones_like.default: (_ones, _ONE),
    _aten.slice_backward.default: (_backward_of("slice_backward", _aten.slice.Tensor), _ONE),
    _aten.select_backward.default: (_backward_of("select_backward", _aten.select.int), _ONE),
    _aten.slice_scatter.default: (_scatter("slice_scatter", _aten.slice.Tensor), _ONE),
    _aten.select_scatter.default: (_scatter("select_scatter", _aten.select.int), _ONE),
    _aten.embedding.default: (_embedding, _ONE),
    _aten._safe_softmax.default: (_safe_softmax, _ONE),
}

ON_CPU: dict[Any, Composed] = {
    _aten.relu.default: (_relu, _ONE),
    _aten.native_dropout.default: (_dropout, ("out", "mask")),
    EAGER_DROPOUT: (_eager_dropout, ("out", "mask")),
    _aten.native_dropout_backward.default: (_dropout_backward, _ONE),
    _aten._native_batch_norm_legit_functional.default: (
        _batch_norm,
        ("out", "save_mean", "save_invstd", "new_mean", "new_var"),
    ),
    _aten._adaptive_avg_pool2d.default: (_pool_whole, _ONE),
}
"""Variants for the CPU only: torch's CUDA kernels compute otherwise."""

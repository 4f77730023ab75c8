"""One rank's share of a model under tensor parallelism, for the estimate of ranks that are absent.

As Megatron-LM shares a layer (arXiv:1909.08053, section 3): products by columns and then by rows,
one all-reduce after the rows' forward and one after the columns' backward. Which layer is shared
how is said by the model's `tp_plan` (Hugging Face's: pattern of a module's name → style).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from memopt.torch_private.operators import collectives

_OPS = collectives()
COLUMNS, ROWS, GATHERED, WORDS = (
    "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
)  # fmt: skip


class _SlopesSummed(torch.autograd.Function):
    """Gives ranks the same tensor, whose slopes are sums of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _sum(slope, ctx.group), None


class _Summed(torch.autograd.Function):
    """Sums ranks' tensors, which have the same slopes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


class _Joined(torch.autograd.Function):
    """Joins ranks' columns; each gets the slopes of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.columns = x.shape[-1]
        whole = _OPS.all_gather_into_tensor.default(x.contiguous(), ranks, group)
        return torch.cat(_OPS.wait_tensor.default(whole).chunk(ranks), -1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope[..., : ctx.columns].contiguous(), None, None


def _sum(x: Tensor, group: str) -> Tensor:
    summed: Tensor = _OPS.wait_tensor.default(_OPS.all_reduce.default(x.contiguous(), "sum", group))
    return summed


_copied, _summed, _joined = (
    cast("Callable[..., Tensor]", one.apply) for one in (_SlopesSummed, _Summed, _Joined)
)


class _Share(nn.Module):
    """Rank 0's part of a linear layer or of a table of words."""

    def __init__(self, whole: nn.Linear | nn.Embedding, style: str, mesh: DeviceMesh) -> None:
        super().__init__()
        self.style, self.ranks = style, mesh.size()
        self.group = mesh.get_group().group_name
        self.weight = _part(whole.weight, int(style == ROWS), self.ranks)
        bias = getattr(whole, "bias", None)
        self.bias = bias if bias is None or style == ROWS else _part(bias, 0, self.ranks)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == WORDS:
            here = x < self.weight.shape[0]
            found = functional.embedding(torch.where(here, x, 0), self.weight)
            return _summed(found * here.unsqueeze(-1), self.group)
        if self.style == ROWS:
            y = _summed(functional.linear(x, self.weight), self.group)
            return y if self.bias is None else y + self.bias
        part = functional.linear(_copied(x, self.group), self.weight, self.bias)
        if self.style == COLUMNS:
            return part
        return _joined(part, self.group, self.ranks)


def _part(whole: Tensor, dim: int, ranks: int) -> nn.Parameter:
    size = whole.shape[dim]
    if size % ranks:
        raise ValueError(f"{ranks} ranks do not divide {size}")
    part = whole.detach().narrow(dim, 0, size // ranks).clone()
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def tensor_plan(model: nn.Module) -> Mapping[str, str]:
    """Return a model's plan of tensor parallelism (`tp_plan`).

    Raises:
        ValueError: it has none, or one with styles that this module does not know.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    others = set(plan.values()) - {COLUMNS, ROWS, GATHERED, WORDS}
    if not plan or others:
        what = f"a tp_plan with {', '.join(sorted(others))}" if others else "no tp_plan"
        raise ValueError(f"{type(model).__name__} has {what}: its layers are not shared")
    return plan


def share_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replace a model's layers by rank 0's shares of them, in place.

    Args:
        model: on meta, with a `tp_plan`.
        mesh: of one dimension.

    Raises:
        ValueError: it has no plan, or its sizes are no multiples of the ranks.
    """
    styles = {re.compile(name.replace(".", r"\.").replace("*", r"\d+")): style
              for name, style in tensor_plan(model).items()}  # fmt: skip
    made: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        style = next((s for pattern, s in styles.items() if pattern.fullmatch(path)), None)
        if style is None or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        share = _Share(module, style, mesh)
        # Tied weights stay tied.
        share.weight = made.setdefault(id(module.weight), share.weight)
        model.set_submodule(path, share)
    return model

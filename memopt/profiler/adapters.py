"""Models whose weights are frozen and trained by adapters of low rank, as estimates need them.

LoRA (Hu et al., arXiv:2106.09685): y = W x + 2 B A x, A of r rows, W frozen. QLoRA (Dettmers et
al., arXiv:2305.14314) stores W in 4 bits, with an 8-bit scale for each 64 weights and a 32-bit one
for each 256 of those, and dequantizes it whenever it is read, in the backward again. The
dequantization is an operator that is priced by its bytes and never run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SCALE = 2.0
"""alpha / r: of LitGPT's and of torchtune's recipes."""
_GROUP = 64
_GROUPS = 256


@torch.library.custom_op("memopt::dequantized", mutates_args=())
def _dequantized(packed: Tensor, scales: Tensor, rows: int, beside: Tensor) -> Tensor:
    """`beside`: has the dtype, and says when: what reads no gradient is a part of the forward."""
    raise NotImplementedError("weights in 4 bits are estimated only; bitsandbytes computes them")


@_dequantized.register_fake
def _(packed: Tensor, scales: Tensor, rows: int, beside: Tensor) -> Tensor:
    return beside.new_empty((rows, 2 * packed.numel() // rows))


class _Product(torch.autograd.Function):
    """x Wᵀ of a W in 4 bits, which the backward dequantizes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.rows = rows
        return functional.linear(x, _dequantized(packed, scales, rows, x[..., :1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = _dequantized(*ctx.saved_tensors, ctx.rows, gradient[..., :1])
        return gradient @ weight, None, None, None


class Quantized(nn.Module):
    """A linear layer with a weight in 4 bits, for estimates."""

    def __init__(self, base: nn.Module, wide: int, narrow: int) -> None:
        super().__init__()
        groups = -(-wide * narrow // _GROUP)
        sizes = {"packed": wide * narrow // 2, "scales": groups + 4 * -(-groups // _GROUPS)}
        for name, size in sizes.items():
            made = torch.empty(size, dtype=torch.uint8, device=_weight(base).device)
            self.register_buffer(name, made)
        self.narrow, self.bias = narrow, getattr(base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dequantized weight, and add the bias."""
        y: Tensor = _Product.apply(x, self.packed, self.scales, self.narrow)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class Adapted(nn.Module):
    """A frozen layer beside an adapter of low rank."""

    def __init__(self, base: nn.Module, rank: int, quantized: bool) -> None:
        super().__init__()
        like = _weight(base)
        wide, narrow = _widths(base)
        made: dict[str, Any] = {"device": like.device, "dtype": like.dtype, "bias": False}
        self.base = Quantized(base, wide, narrow) if quantized else base
        self.narrow = nn.Linear(wide, rank, **made)
        self.widen = nn.Linear(rank, narrow, **made)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's result to the frozen layer's."""
        y: Tensor = self.base(x) + self.widen(self.narrow(x)) * SCALE
        return y


def _weight(layer: nn.Module) -> Tensor:
    found: Any = layer.weight
    return found  # type: ignore[no-any-return]


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Return the width of a layer's input and of its output."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    rows, columns = _weight(layer).shape  # transformers' Conv1D
    return rows, columns


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer can have an adapter: torch's Linear or transformers' Conv1D."""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


def adapted(
    model: nn.Module, rank: int, *, inside: Iterable[str] = (), quantized: bool = False
) -> nn.Module:
    """Freeze a model and give its linear layers adapters; it is changed in place.

    Args:
        model: on meta, or with weights, which stay.
        rank: of the adapters.
        inside: paths of the lists of blocks whose layers get them; none: all layers but the last.
        quantized: hold the frozen weights of these layers in 4 bits.

    Raises:
        ValueError: there is no such layer, or a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"the rank of adapters is at least 1, got {rank}")
    model.requires_grad_(False)
    found = [(name, layer) for name, layer in model.named_modules() if is_linear(layer)]
    paths = tuple(f"{path}." for path in inside)
    own = [(name, layer) for name, layer in found if name.startswith(paths)] if paths else []
    own = own or found[:-1]
    if not own:
        raise ValueError(f"{type(model).__name__} has no linear layers for adapters")
    for name, layer in own:
        parent, _, child = name.rpartition(".")
        even = _weight(layer).numel() % 2 == 0
        setattr(model.get_submodule(parent), child, Adapted(layer, rank, quantized and even))
    return model

"""Models whose weights are frozen and trained by adapters of low rank, as estimates need them.

LoRA (Hu et al., arXiv:2106.09685): y = W x + 2 B A x, A of r rows, W frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

SCALE = 2.0
"""alpha / r: of LitGPT's and of torchtune's recipes."""


class Adapted(nn.Module):
    """A frozen layer beside an adapter of low rank."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        like = _weight(base)
        wide, narrow = _widths(base)
        made: dict[str, Any] = {"device": like.device, "dtype": like.dtype, "bias": False}
        self.base = base
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


def adapted(model: nn.Module, rank: int, *, inside: Iterable[str] = ()) -> nn.Module:
    """Freeze a model and give its linear layers adapters; it is changed in place.

    Args:
        model: on meta, or with weights, which stay.
        rank: of the adapters.
        inside: paths of the lists of blocks whose layers get them; none: all layers but the last.

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
        setattr(model.get_submodule(parent), child, Adapted(layer, rank))
    return model

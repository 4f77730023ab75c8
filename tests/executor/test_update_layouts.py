"""Updates in place leave a tensor's strides as they are in a planned step, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.capture.capture import capture
from memopt.step.inputs import to_call
from tests.executor.harness import Case, check

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda h: h.transpose(-1, -2).clone(),
    "permuted": lambda h: h.permute(2, 0, 1).clone(),
    "view": lambda h: h.clone().transpose(-1, -2),
    "slice": lambda h: h.clone()[:, ::2].transpose(-1, -2),
    "channels-last": lambda h: h.reshape(4, 2, 4, 8).to(memory_format=torch.channels_last),
}


def _bits(g: Tensor) -> Tensor:
    """Indices of 0 and 1."""
    return (g.detach() > 0).long()


def _rows(g: Tensor) -> Tensor:
    return torch.arange(len(g)).flip(0)


def _through_view(g: Tensor) -> Tensor:
    turned = g.transpose(0, -1)
    turned.masked_fill_(turned > 0, 0.1)
    return g


UPDATES: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill_": lambda g: g.masked_fill_(g > 0, 0.5),
    "masked_fill_, a tensor": lambda g: g.masked_fill_(g > 0, torch.tensor(0.5)),
    "masked_fill_, a view": _through_view,
    "masked_scatter_": lambda g: g.masked_scatter_(g > 0, g.detach().cos()),
    "scatter_": lambda g: g.scatter_(0, _bits(g[:1]), 0.5),
    "scatter_, a tensor": lambda g: g.scatter_(0, _bits(g[:1]), g.detach().cos()),
    "scatter_add_": lambda g: g.scatter_add_(0, _bits(g), g.detach().cos()),
    "scatter_reduce_": lambda g: g.scatter_reduce_(0, _bits(g), g.detach().cos(), "mean"),
    "index_add_": lambda g: g.index_add_(0, _rows(g), g.detach().cos()),
    "index_put_": lambda g: g.index_put_((_rows(g)[:2],), torch.tensor(0.3)),
    "cumsum_": lambda g: g.cumsum_(0),
    "tril_": lambda g: g.tril_().triu_(-2),
    "renorm_": lambda g: g.renorm_(2, 0, 0.7),
    "copy_": lambda g: g.copy_(g.detach().contiguous().cos()),
    "mul_, clamp_": lambda g: g.mul_(2).clamp_(-0.5, 0.5),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "minimum": lambda g: torch.minimum(g, g),
    "maximum": lambda g: torch.maximum(g, g.sin()),
    "masked_fill": lambda g: g.masked_fill(g > 0, 0.5),
    "masked_scatter": lambda g: g.masked_scatter(g > 0, g.detach().cos()),
}


class Updates(nn.Module):
    """Its outputs show the strides that updates leave, its gradients the order of later sums."""

    def __init__(self, updates: list[Callable[[Tensor], Tensor]], layout: str) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.updates, self.layout = updates, LAYOUTS[layout]

    def forward(self, x: Tensor) -> list[Tensor]:
        normal = functional.softsign(self.norm(self.linear(x).transpose(1, 2)))
        outputs = []
        for update in self.updates:
            updated = update(self.layout(normal))
            outputs += [updated.detach() * 2, (updated * updated).mean(0)]
        return outputs


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 4 * 8 * 8).view(4, 8, 8).sin()


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ("transposed", slice(0, None, 2)),
        ("transposed", slice(1, None, 2)),
        ("permuted", slice(0, None, 3)),
        ("view", slice(1, None, 3)),
        ("slice", slice(2, None, 3)),
        ("channels-last", slice(0, None, 3)),
    ],
)
def test_as_eager(layout: str, share: slice) -> None:
    """Under every program: stored, recomputed, swapped, in place, at planned addresses."""
    updates = list((UPDATES | OTHERS).values())[share]
    check(Case(partial(Updates, updates, layout), _inputs, steps=1))


class Minimum(nn.Module):
    """A transposed gradient that autograd fills in place, before a normalisation's backward."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.pick = nn.Linear(6, 8), nn.BatchNorm1d(8), pick

    def forward(self, x: Tensor) -> Tensor:
        turned = functional.softsign(self.norm(self.linear(x))).transpose(0, -1)
        picked = self.pick(turned, turned)
        return picked.mean(0, keepdim=True).expand_as(picked)


@pytest.mark.parametrize(
    "pick", [torch.minimum, torch.maximum, torch.fmax, torch.fmin, torch.clamp_min, torch.clamp_max]
)
def test_a_backward_that_fills_in_place(pick: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(Case(partial(Minimum, pick), lambda: torch.linspace(-1, 1, 24).view(4, 6).sin()))


class FilledBuffer(nn.Module):
    """A transposed buffer that every forward fills in part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("kept", torch.linspace(-1, 1, 64).view(8, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        self.kept.masked_fill_(self.kept > x.detach().mean() + 0.5, 0.2)  # type: ignore[operator]
        return self.linear(x) * self.kept.sum(0)  # type: ignore[operator]


def test_a_buffer_is_filled() -> None:
    check(Case(FilledBuffer, _inputs))


@pytest.mark.parametrize(
    ("update", "layout", "expected"),
    [
        ("masked_fill_", "transposed", "memopt.masked_fill.Scalar"),
        ("masked_fill", "transposed", "aten.masked_fill.Scalar"),
        ("masked_fill_", "rows", "aten.masked_fill.Scalar"),
    ],
)
def test_only_what_changes_strides_is_replaced(update: str, layout: str, expected: str) -> None:
    class Fill(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x).sin()
            given = rows if layout == "rows" else rows.t().clone()
            filled = (UPDATES | OTHERS)[update](given)
            return filled.sum(0)

    module = capture(Fill(8, 8), to_call(torch.ones(4, 8))).module
    names = [str(node.target) for node in module.graph.nodes if "masked_fill" in str(node.target)]
    assert names[0] == expected
    assert module.graph.eliminate_dead_code() is False

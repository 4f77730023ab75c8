"""Chains of views in the generated code: one look into a result of certain layout, or its name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor.views import looked
from tests.executor.harness import Case, check


class Heads(nn.Module):
    """Queries, keys and values are slices of one product, turned, and looked at more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = query @ key.transpose(-2, -1)
        mixed = (torch.tanh(scores) @ value).transpose(1, 2).reshape(2, 4, 8)
        return self.out(mixed), mixed[:, 1:, ::2]


class Filtered(nn.Module):
    """Where the results of convolutions lie in memory is the library's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.filter(x).flatten(2).transpose(1, 2))


def _tokens() -> tuple[Tensor]:
    return (torch.randn(2, 4, 8),)


def _image() -> tuple[Tensor]:
    return (torch.randn(2, 3, 8, 8),)


def _code(model: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    plan = memopt.plan(model, inputs, strategy="store-all", progress=False)
    return plan.apply(model).code


@pytest.mark.slow
def test_every_program_has_eagers_bits() -> None:
    """As the other modules of this folder, which are full of views; here alone in every program."""
    check(Case(Heads, _tokens, steps=1))


def test_a_chain_of_views_is_one_look() -> None:
    code = _code(Heads(), _tokens())
    made = dict(re.findall(r"    (\w+) = looked\((\w+), ", code))
    assert made
    # They look into products themselves, not into views of them.
    assert all(re.search(rf"    {root} = aten_\w*mm_default\(", code) for root in made.values())


def test_what_is_turned_twice_is_itself() -> None:
    code = _code(Heads(), _tokens())
    assert len(re.findall(r"    \w+ = primals_\d+\n", code)) >= 1
    assert code.count("aten_t_default(primals_") == 2


def test_results_of_uncertain_layout_are_looked_at_as_captured() -> None:
    code = _code(Filtered(), _image())
    assert "aten_transpose_int(" in code
    assert "looked(" not in code


class Counted(Tensor):
    """A tensor that is to go through the dispatcher."""


def test_other_tensors_are_looked_at_by_their_own_views() -> None:
    whole = torch.arange(24.0)[2:].view(2, 11)
    for root in (whole, whole.as_subclass(Counted)):
        view = looked()(root, (3, 2), (2, 11), 4)
        assert type(view) is type(root)
        assert torch.equal(view.as_subclass(Tensor), whole[:, 4:10:2].t())
        assert view.data_ptr() == whole[0, 4:].data_ptr()

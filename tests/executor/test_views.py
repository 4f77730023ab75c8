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
    # They look into what the step gets or computes, not into views of that.
    assert not {*made} & {*made.values()}
    products = {r for r in made.values() if re.search(rf"    {r} = aten_\w*mm_default\(", code)}
    assert products
    # Of products the layout is certain.
    asked = set(re.findall(r" if (\w+)\.stride\(\) == ", code))
    assert asked
    assert not asked & products


def test_what_is_turned_twice_is_itself() -> None:
    code = _code(Heads(), _tokens())
    assert len(re.findall(r"    \w+ = primals_\d+\n", code)) >= 1
    assert len(re.findall(r"    t\w* = looked\(primals_", code)) == 2


def test_results_of_uncertain_layout_are_looked_at_when_the_step_runs() -> None:
    code = _code(Filtered(), _image())
    looks = re.findall(
        r" = looked\((\w+), .* if \1\.stride\(\) == .* else aten_transpose_int\(", code
    )
    assert looks
    assert f"    {looks[0]} = aten_convolution_default(" in code


@torch.library.custom_op("memopt_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Lay a matrix out by columns, unlike what it is described to return."""
    return x.t().clone(memory_format=torch.contiguous_format).t()


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda _, gradient: gradient)


class Turned(nn.Module):
    """A view of a result that is laid out otherwise than described. All numbers are integers: by
    the layout as described, torch chooses the product that makes the gradient, and how each of them
    rounds depends on the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(4, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(turned(self.first(x)).transpose(0, 1)).square()


def test_a_result_laid_out_otherwise_is_looked_at_as_captured() -> None:
    inputs = torch.randint(-3, 4, (4, 8)).float()
    check(Case(Turned, lambda: (inputs.clone(),), lambda out: (out * out).sum(), steps=1))


class Counted(Tensor):
    """A tensor that is to go through the dispatcher."""


def test_other_tensors_are_looked_at_by_their_own_views() -> None:
    whole = torch.arange(24.0)[2:].view(2, 11)
    for root in (whole, whole.as_subclass(Counted)):
        view = looked()(root, (3, 2), (2, 11), 4)
        assert type(view) is type(root)
        assert torch.equal(view.as_subclass(Tensor), whole[:, 4:10:2].t())
        assert view.data_ptr() == whole[0, 4:].data_ptr()

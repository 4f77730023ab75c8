"""Strides of dimensions of size one are those that eager has: by them products choose kernels."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memopt
from memopt.capture.as_eager.layouts import layouts_of_kernels

CPU = torch.device("cpu")
CALLS = {
    "view": lambda x: x.view(1, *x.shape, 1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(0, (x.shape[0], 1)),
    "add": lambda x: x + 1,
    "relu": lambda x: x.relu(),
    "gelu": functional.gelu,
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.log_softmax(0),
    "flip": lambda x: x.flip(0),
    "tril": lambda x: x.tril(),
}


def drawn_layout(random_: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape with dimensions of size one, and strides without gaps but for these."""
    shape = [random_.choice([1, 1, 2, 3]) for _ in range(random_.randrange(2, 5))]
    order = random_.sample(range(len(shape)), len(shape))
    value = torch.empty(shape).permute(order)
    strides = [
        stride if size > 1 else random_.choice([stride, 1, 7])
        for size, stride in zip(value.shape, value.stride(), strict=True)
    ]
    return tuple(value.shape), tuple(strides)


@pytest.mark.parametrize("name", list(CALLS))
def test_fake_results_have_every_stride_of_real_ones(name: str) -> None:
    random_, call = random.Random(0), CALLS[name]
    layouts = [drawn_layout(random_) for _ in range(20)]
    with FakeTensorMode(), layouts_of_kernels(CPU):
        fake = [call(torch.empty_strided(*layout)).stride() for layout in layouts]
    assert fake == [call(torch.ones(99).as_strided(*layout)).stride() for layout in layouts]


class OneQuery(nn.Module):
    """Attention of one token, as a class token's, written as products of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        weights = torch.einsum("bhid,bhjd->bhij", query, keys)
        weights = torch.einsum("bhij,hg->bgij", weights, self.mix)
        return torch.einsum("bhij,bhjd->bhid", weights, values)


def test_attention_of_one_token_has_eagers_bits() -> None:
    torch.manual_seed(0)
    planned = OneQuery().train()
    eager = copy.deepcopy(planned)
    memopt.wrap(planned, "min", "store-all", progress=False)
    given = [torch.randn(2, 4, length, 64) for length in (1, 17, 17)]
    found = []
    for model in (eager, planned):
        mine = [one.clone().requires_grad_() for one in given]
        model(*mine).square().mean().backward()
        found.append([one.grad for one in (*mine, model.mix)])
    assert all(map(torch.equal, *found))


class Branches(nn.Module):
    """Two sums of gradients, in eager one in place and one, of a gradient that is still needed,
    out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.ins = nn.ModuleList(nn.Conv2d(8, 16, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.outs = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        one, other = (norm(conv(x)) for norm, conv in zip(self.norms, self.ins, strict=False))
        first, second = self.outs[0](one), self.outs[1](other)
        return self.norms[2](self.outs[2](first + second + (one + other)))


def test_sums_of_gradients_of_one_pixel_have_eagers_layout() -> None:
    torch.manual_seed(0)
    planned = Branches().to(memory_format=torch.channels_last)
    eager = copy.deepcopy(planned)
    memopt.wrap(planned, "min", "store-all", progress=False)
    x = torch.randn(4, 8, 1, 1).contiguous(memory_format=torch.channels_last)
    for model in (eager, planned):
        model(x).square().mean().backward()
    found, wanted = ([one.grad for one in model.parameters()] for model in (planned, eager))
    assert all(map(torch.equal, found, wanted))

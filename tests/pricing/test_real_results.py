"""Kernels leave the memory that a captured graph says they write, or the capture is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.capture.as_eager import fake_results
from memopt.capture.capture import capture
from memopt.pricing.measure import MeasureOptions, costs_of
from memopt.pricing.real_results import check_results
from memopt.step.build import build
from memopt.step.inputs import to_call

CPU = torch.device("cpu")


class Of(nn.Module):
    """A function of a trained tensor, and of modules."""

    def __init__(self, compute: Callable[..., Any], *shape: int, **modules: nn.Module) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(*shape))
        self.compute, self.parts = compute, nn.ModuleDict(modules)

    def forward(self, scale: Tensor) -> Any:
        return self.compute(self.x * scale, *self.parts.values())


def used(x: Tensor, part: nn.Module) -> Any:
    return part(x)


def attended(x: Tensor, part: nn.Module) -> Any:
    return part(x, x, x, need_weights=False)[0]


def bagged(x: Tensor, mode: str) -> Tensor:
    index = torch.tensor([0, 2, 1, 3])
    return F.embedding_bag(index, x, torch.tensor([0, 2]), mode=mode)


SEQUENCE, IMAGES = (3, 5, 8), (2, 4, 8, 8)
CASES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Of(used, *SEQUENCE, part=nn.LSTM(8, 6)),
    "lstm of two layers, both ways": lambda: Of(
        used, *SEQUENCE, part=nn.LSTM(8, 6, 2, bidirectional=True, dropout=0.1)
    ),
    "lstm without biases": lambda: Of(used, *SEQUENCE, part=nn.LSTM(8, 6, bias=False)),
    "lstm with a projection": lambda: Of(used, *SEQUENCE, part=nn.LSTM(8, 6, proj_size=3)),
    "lstm cell": lambda: Of(used, 3, 8, part=nn.LSTMCell(8, 6)),
    "gru": lambda: Of(used, *SEQUENCE, part=nn.GRU(8, 6, 2, bidirectional=True)),
    "rnn": lambda: Of(used, *SEQUENCE, part=nn.RNN(8, 6, nonlinearity="relu")),
    "attention": lambda: Of(attended, *SEQUENCE, part=nn.MultiheadAttention(8, 2)),
    "sdpa": lambda: Of(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 2, 2, 8, 8
    ),
    "batch norm": lambda: Of(used, *IMAGES, part=nn.BatchNorm2d(4)),
    "batch norm without affine": lambda: Of(used, *IMAGES, part=nn.BatchNorm2d(4, affine=False)),
    "batch norm in eval mode": lambda: Of(used, *IMAGES, part=nn.BatchNorm2d(4).eval()),
    "instance norm": lambda: Of(used, *IMAGES, part=nn.InstanceNorm2d(4)),
    "group norm": lambda: Of(used, *IMAGES, part=nn.GroupNorm(2, 4, affine=False)),
    "layer norm without affine": lambda: Of(
        used, *SEQUENCE, part=nn.LayerNorm(8, elementwise_affine=False)
    ),
    "layer norm": lambda: Of(used, *SEQUENCE, part=nn.LayerNorm(8)),
    "convolution": lambda: Of(used, *IMAGES, part=nn.Conv2d(4, 6, 3)),
    "convolution, frozen": lambda: Of(
        used, *IMAGES, part=nn.Conv2d(4, 6, 3, stride=2).requires_grad_(False)
    ),
    "convolution without bias": lambda: Of(used, *IMAGES, part=nn.Conv2d(4, 4, 3, bias=False)),
    "transposed convolution": lambda: Of(used, *IMAGES, part=nn.ConvTranspose2d(4, 6, 3)),
    "embedding bag, sums": lambda: Of(lambda x: bagged(x, "sum"), 4, 6),
    "embedding bag, means": lambda: Of(lambda x: bagged(x, "mean"), 4, 6),
    "embedding bag, largest": lambda: Of(lambda x: bagged(x, "max"), 4, 6),
    "largest of windows": lambda: Of(
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0] + F.adaptive_max_pool2d(x, 4), *IMAGES
    ),
    "fractional windows": lambda: Of(used, *IMAGES, part=nn.FractionalMaxPool2d(2, output_size=4)),
    "sorted, largest, middle": lambda: Of(
        lambda x: (x.sort(0)[0], x.topk(2)[0], x.median(0)[0], x.cummax(0)[0], x.kthvalue(2)[0]),
        *SEQUENCE,
    ),
    "spread": lambda: Of(lambda x: (*torch.var_mean(x, 0), *torch.std_mean(x, 1)), *SEQUENCE),
    "split": lambda: Of(lambda x: [one.tanh() for one in x.split(3, -1)], *SEQUENCE),
    "folded": lambda: Of(lambda x: F.fold(F.unfold(x, 3), (8, 8), 3), *IMAGES),
    "decomposed": lambda: Of(
        lambda x: (torch.linalg.qr(x)[0], torch.linalg.svdvals(x), torch.linalg.slogdet(x)[1]),
        4,
        4,
    ),
    "prelu": lambda: Of(used, *IMAGES, part=nn.PReLU(4)),
    "losses": lambda: Of(
        lambda x: (
            F.cross_entropy(x, torch.tensor([0, 1, 2])),
            F.multi_margin_loss(x, torch.tensor([0, 1, 2])),
            F.huber_loss(x, x.detach() + 1),
        ),
        3,
        4,
    ),
    "sampled": lambda: Of(
        lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2), align_corners=False), *IMAGES
    ),
    "bilinear": lambda: Of(lambda x, part: part(x, x), 3, 4, part=nn.Bilinear(4, 4, 2)),
}


def check(model: nn.Module) -> None:
    captured = capture(model, to_call(torch.ones(())))
    lowering = build(model, captured)
    options = MeasureOptions()
    costs = costs_of(lowering.signatures, CPU, options, captured=captured, timed=False)
    check_results(lowering, costs)


@pytest.mark.parametrize("name", CASES)
def test_kernels_leave_what_the_graph_says(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name]())


def test_a_fake_kernel_that_describes_two_results_as_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_results, "_in_own_storages", lambda results: results)
    with pytest.raises(memopt.CaptureError, match=r"mkldnn_rnn_layer_backward.*register_fake"):
        check(CASES["lstm"]())


LIBRARY = torch.library.Library("memopt_tests", "FRAGMENT")
SHARING: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "argument": (
        lambda x: (2 * x, x.view_as(x)),
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
        r"argument.*leaves 240 B \(240 bytes\).*has 480 B \(240 \+ 240 bytes\)",
    ),
    "result": (
        lambda x: (2 * x, 3 * x),
        lambda x: (torch.empty_like(x),) * 2,
        r"result.*leaves 480 B \(240 \+ 240 bytes\).*has 240 B \(240 bytes\)",
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_kernels_that_share_other_storages_than_their_fake_ones_are_refused(name: str) -> None:
    kernel, described, message = SHARING[name]
    if not hasattr(torch.ops.memopt_tests, f"shared_{name}"):
        LIBRARY.define(f"shared_{name}(Tensor x) -> (Tensor, Tensor)")
        LIBRARY.impl(f"shared_{name}", kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"memopt_tests::shared_{name}", described, lib=LIBRARY)
    overload = getattr(torch.ops.memopt_tests, f"shared_{name}").default
    with pytest.raises(memopt.CaptureError, match=message):
        check(Of(lambda x: (*overload(x.detach().tanh()), x.tanh()), 3, 20))


@pytest.mark.parametrize("both_ways", [False, True])
def test_lstms_keep_their_budgets(both_ways: bool) -> None:
    torch.manual_seed(0)
    model = Of(used, *SEQUENCE, part=nn.LSTM(8, 64, 2, bidirectional=both_ways))
    plan = memopt.plan(model, torch.ones(()), budget="min", progress=False)
    assert plan.check(model).measured_peak_bytes <= plan.peak_bytes <= plan.budget

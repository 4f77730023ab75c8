"""The loss's backward that regions compile, against ATen's."""

from __future__ import annotations

import pytest
import torch

from memopt.profiler.compiled.losses import nll_loss_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_backward_of_the_negative_log_likelihood(
    dtype: torch.dtype, reduction: int, weighted: bool, ignored: int
) -> None:
    x = torch.randn(6, 5).log_softmax(-1).to(dtype)
    target = torch.tensor([0, 4, 3, 3, 1, ignored])
    weight = torch.rand(5).to(dtype) if weighted else None
    loss, total = torch.ops.aten.nll_loss_forward(x, target, weight, reduction, ignored)
    grad = torch.randn(loss.shape).to(dtype)
    arguments = (grad, x, target, weight, reduction, ignored, total)
    expected = torch.ops.aten.nll_loss_backward(*arguments)
    found = nll_loss_backward(*arguments)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_backward_of_one_row() -> None:
    x, target = torch.randn(5), torch.tensor(2)
    arguments = (torch.tensor(2.0), x, target, None, 1, -100, torch.tensor(1.0))
    torch.testing.assert_close(
        nll_loss_backward(*arguments), torch.ops.aten.nll_loss_backward(*arguments)
    )

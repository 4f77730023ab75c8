"""The cross-entropy's kernels: chunked against float64, by rows against ATen's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from memopt.kernels import cross_entropy

F64 = torch.float64
ATEN = torch.ops.aten
MEAN, SUM = 1, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_chunked_against_float64(dtype: torch.dtype, reduction: int) -> None:
    rng = random.Random(reduction)
    for seed in range(6):
        torch.manual_seed(seed)
        rows, features, classes = rng.randint(1, 37), rng.randint(1, 9), rng.randint(2, 50)
        hidden, weight = torch.randn(rows, features).to(dtype), torch.randn(classes, features)
        weight, bias = weight.to(dtype), torch.randn(classes).to(dtype) if seed % 2 else None
        target = torch.randint(0, classes, (rows,))
        target[rng.randrange(rows) :: 3] = -100
        target[0] = 0
        given = (hidden, weight.t(), bias, target, reduction, -100)
        loss, count, *made = cross_entropy.LOSS(*given, (True, True, bias is not None))
        g = torch.tensor(0.7)
        scaled = [None if x is None else cross_entropy.SCALED(x, g) for x in made]
        wide = [None if x is None else x.to(F64).requires_grad_() for x in (hidden, weight, bias)]
        logits = torch.nn.functional.linear(*wide)  # type: ignore[arg-type]  # tensors
        how = "mean" if reduction == MEAN else "sum"
        reference = torch.nn.functional.cross_entropy(logits, target, reduction=how)
        reference.backward(g.to(F64))
        # A logit is off by ε times its terms (products in bfloat16 are rounded to it), and so are
        # the probabilities; a row's gradient is at most 2 in all, over the count for the mean.
        terms = [0.0 if x is None else float(x.to(F64).abs().max()) for x in (hidden, weight, bias)]
        most = 1 + float((hidden.to(F64).abs() @ weight.to(F64).abs().t()).max()) + terms[2]
        step = 64 * torch.finfo(dtype).eps * most
        share = 0.7 * (1.0 / float(count) if reduction == MEAN else 1.0)
        assert abs(float(loss) - float(reference.detach())) <= step * (
            float(count) if reduction == SUM else 1.0
        )
        sums = (terms[1], float(hidden.to(F64).abs().sum(0).max()), float(rows))
        for found, like, total in zip(scaled, wide, sums, strict=True):
            assert (found is None) == (like is None)
            if found is not None and like is not None and like.grad is not None:
                error = float((found.to(F64).view_as(like) - like.grad).abs().max())
                assert error <= step * share * 2 * total
                assert found.dtype == dtype
        assert float(count) == int((target != -100).sum())


def test_chunked_without_targets_is_pytorchs() -> None:
    given: tuple[Any, ...] = (torch.randn(3, 2), torch.randn(2, 5), None, torch.full((3,), -100))
    loss, count, *made = cross_entropy.LOSS(*given, MEAN, -100, (True, True, False))
    assert bool(loss.isnan())
    assert float(count) == 0
    assert all(not bool(x.any()) for x in made[:2])
    assert made[2] is None


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_rows_are_the_same_bits(dtype: torch.dtype) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        rows, classes = rng.randint(1, 40), rng.randint(2, 900)
        logs = (torch.randn(rows, classes) * 5).to(dtype).log_softmax(1)
        if seed == 3:
            logs.view(-1)[0] = float("nan")
        target = torch.randint(0, classes, (rows,))
        target[::3] = -100
        weights = torch.rand(classes).to(dtype) if seed % 2 else None
        reduction = MEAN if seed % 3 else SUM
        _, count = ATEN.nll_loss_forward(logs, target, weights, reduction, -100)
        g = torch.tensor(0.7, dtype=dtype)
        picked = ATEN.nll_loss_backward(g, logs, target, weights, reduction, -100, count)
        expected = ATEN._log_softmax_backward_data(picked, logs, 1, dtype)
        args = (logs, g, target, weights, reduction, -100, count)
        found = cross_entropy.ROWS(*args)
        assert cross_entropy.ROWS.over is not None
        over = cross_entropy.ROWS.over(*args)
        assert over is logs
        for one in (found, over):
            assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))

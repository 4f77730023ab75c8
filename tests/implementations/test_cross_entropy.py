"""The chunked cross-entropy's kernels against float64: loss, and both products' gradients."""

from __future__ import annotations

import random

import pytest
import torch

from memopt.implementations import cross_entropy

F64 = torch.float64
MEAN, SUM = 1, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_against_float64(dtype: torch.dtype, reduction: int) -> None:
    rng = random.Random(reduction)
    for seed in range(4):
        torch.manual_seed(seed)
        rows, features, classes = rng.randint(1, 37), rng.randint(1, 9), rng.randint(2, 50)
        hidden, weight = torch.randn(rows, features), torch.randn(classes, features)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        target = torch.randint(0, classes, (rows,))
        target[rng.randrange(rows) :: 3] = -100
        target[0] = 0
        given = (hidden, weight.t(), target, reduction, -100)
        loss, count = cross_entropy.LOSS(*given)
        g = torch.tensor(0.7)
        by_hidden = cross_entropy.HIDDEN(g, *given, count)
        by_weight = cross_entropy.WEIGHT(g, *given, count)
        h64, w64 = hidden.to(F64).requires_grad_(), weight.to(F64).requires_grad_()
        logits = h64 @ w64.t()
        how = "mean" if reduction == MEAN else "sum"
        reference = torch.nn.functional.cross_entropy(logits, target, reduction=how)
        reference.backward(g.to(F64))
        assert h64.grad is not None
        assert w64.grad is not None
        assert by_weight.shape == weight.shape
        # A logit is off by ε times its terms (products in bfloat16 are rounded to it), and so are
        # the probabilities; a row's gradient is at most 2 in all, over the count for the mean.
        most = 1 + float((h64.abs() @ w64.abs().t()).max())
        step = 64 * torch.finfo(dtype).eps * most
        share = 0.7 * (1.0 / float(count) if reduction == MEAN else 1.0)
        terms = float(count) if reduction == SUM else 1.0
        assert abs(float(loss) - float(reference)) <= step * terms
        bound = step * share * 2 * float(w64.abs().max())
        assert float((by_hidden.to(F64) - h64.grad).abs().max()) <= bound
        bound = step * share * 2 * float(h64.abs().sum(0).max())
        assert float((by_weight.to(F64) - w64.grad).abs().max()) <= bound
        assert float(count) == int((target != -100).sum())

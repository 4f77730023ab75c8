"""The gradient of a cross-entropy's logits in one call, over the log-softmax.

ATen writes the gradient of the log-softmax, which has one element per row that is not 0, as a
tensor as large as the logits, and the gradient of the logits beside it. Here the former exists for
an eighth of the rows at a time. The same kernels on the same rows: exact.
"""

from __future__ import annotations

import torch

from memopt.implementations.kernel import writing
from memopt.implementations.parts import part_bytes, split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _into(
    result: torch.Tensor,
    logs: torch.Tensor,
    g: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor | None,
    reduction: int,
    ignore: int,
    count: torch.Tensor,
) -> torch.Tensor:
    for rows in split(len(logs)):
        picked = ATEN.nll_loss_backward(
            g, logs[rows], target[rows], weights, reduction, ignore, count
        )
        ATEN._log_softmax_backward_data.out(picked, logs[rows], 1, logs.dtype, out=result[rows])
    return result


BACKWARD = writing("cross_entropy_backward.rows", _into)


def attach(sites: Sites) -> None:
    """Mean or sum over rows, with or without class weights; no cast on the way."""
    for softmax_backward in sites.calls("aten._log_softmax_backward_data.default"):
        backward, logs, dim, dtype = softmax_backward.args
        if str(getattr(backward, "target", "")) != "aten.nll_loss_backward.default":
            continue
        g, own, target, weights, reduction, ignore, count = backward.args  # type: ignore[union-attr]  # a node
        value = value_of(logs)
        same = sites.looks_into(own, logs) and value_of(own).shape == value.shape  # type: ignore[arg-type]  # nodes
        if not same or dim not in (1, -1) or value.ndim != 2 or dtype != value.dtype:
            continue
        if reduction not in (1, 2) or not value.is_contiguous():
            continue
        sites.add(
            softmax_backward,
            "rows",
            BACKWARD,
            (logs, g, target, weights, reduction, ignore, count),
            workspace_bytes=part_bytes(value),
            like=((backward, 1.0), (softmax_backward, 1.0)),  # type: ignore[arg-type]  # a node
        )

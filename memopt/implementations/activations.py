"""tanh, sigmoid and softmax: their backward reads the output; here it reads the input, and
computes the output again in scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _tanh(g: torch.Tensor, x: torch.Tensor) -> Any:
    return ATEN.tanh_backward(g, ATEN.tanh(x))


def _sigmoid(g: torch.Tensor, x: torch.Tensor) -> Any:
    return ATEN.sigmoid_backward(g, ATEN.sigmoid(x))


def _safe_softmax(
    g: torch.Tensor, x: torch.Tensor, dim: int, given: Any, dtype: torch.dtype
) -> Any:
    return ATEN._softmax_backward_data(g, ATEN._safe_softmax(x, dim, given), dim, dtype)


def _softmax(g: torch.Tensor, x: torch.Tensor, dim: int, half: bool, dtype: torch.dtype) -> Any:
    return ATEN._softmax_backward_data(g, ATEN._softmax(x, dim, half), dim, dtype)


ROWS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("aten.tanh.default", "aten.tanh_backward.default", _tanh),
    ("aten.sigmoid.default", "aten.sigmoid_backward.default", _sigmoid),
    ("aten._softmax.default", "aten._softmax_backward_data.default", _softmax),
    ("aten._safe_softmax.default", "aten._softmax_backward_data.default", _safe_softmax),
)
"""(forward, backward that reads (gradient, output, ...), the backward from the input)."""


def attach(sites: Sites) -> None:
    """Input-side backwards: exact, since the output is recomputed by the same kernel."""
    for forward_target, backward_target, function in ROWS:
        kernel = Kernel(f"{forward_target.split('.')[1]}_backward.input", function)
        for backward in sites.calls(backward_target):
            forward = sites.producer(backward.args[1])
            if forward is None or str(forward.target) != forward_target:
                continue
            more: tuple[Any, ...] = ()
            if function in (_softmax, _safe_softmax):
                given = (*forward.args[1:], None)[:2]
                more = (*given, backward.args[3])
            size = value_of(forward).untyped_storage().nbytes()
            sites.add(
                backward,
                "input",
                kernel,
                (backward.args[0], forward.args[0], *more),
                workspace_bytes=size,
                like=((forward, 1.0), (backward, 1.0)),
            )

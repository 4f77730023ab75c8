"""Dropout: the boolean mask, the mask in bits, or the mask drawn again from the random state."""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.bits import masks, pack, unpack
from memopt.implementations.kernel import Kernel, with_twin
from memopt.implementations.site import Sites, value_of
from memopt.profiler.as_eager.dropout import dropout

ATEN = torch.ops.aten


def _forward(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    y, mask = dropout(x, p, train)
    return y, pack(mask)


def _backward(g: torch.Tensor, bits: torch.Tensor, scale: float) -> Any:
    if not g.is_contiguous():
        return ATEN.native_dropout_backward(g, unpack(bits, g.shape), scale)
    return _backward_over(g.clone(), bits, scale)


def _backward_over(g: torch.Tensor, bits: torch.Tensor, scale: float) -> Any:
    if not g.is_contiguous():
        return g.copy_(ATEN.native_dropout_backward(g, unpack(bits, g.shape), scale))
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        flat[place] = ATEN.native_dropout_backward(flat[place], mask, scale)
    return g


FORWARD = Kernel("dropout.bitmask.2", _forward)
BACKWARD = with_twin("dropout_backward.bitmask.2", _backward, _backward_over)


def attach(sites: Sites) -> None:
    """`native_dropout` in training mode. Drawing the mask again needs no implementation: it is
    the operator recomputed with only its mask kept (the executor restores the random state)."""
    for backward in sites.calls("aten.native_dropout_backward.default"):
        g, mask, scale = backward.args
        forward = sites.producer(mask)
        if forward is None or str(forward.target) != "aten.native_dropout.default":
            continue
        result = sites.result(forward, 0)
        held = value_of(forward)[1]
        if result is None or not held.is_contiguous():
            continue
        bits = sites.bits(forward, held)
        size = held.numel()
        value_bytes = value_of(result).untyped_storage().nbytes()
        sites.add(
            forward,
            "bitmask",
            FORWARD,
            forward.args,
            (result, bits),
            workspace_bytes=value_bytes + size,
            draws=True,
        )
        # An eighth at a time, but for other layouts.
        scratch = (
            (value_bytes + 2 * size) // 8 if value_of(g).is_contiguous() else value_bytes + size
        )
        sites.add(backward, "bitmask", BACKWARD, (g, bits, scale), workspace_bytes=scratch)

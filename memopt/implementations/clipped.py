"""ReLU and its kin: the backward needs one bit per element, or the output, or the input.

Each writes over its first argument where a plan lets it (MONeT appendix C.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.bits import masks, pack_where, packed_bytes
from memopt.implementations.kernel import Kernel, with_twin
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _relu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_sign(ATEN.relu(x))


def _relu_over(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_sign(ATEN.relu_(x))


def _with_sign(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A NaN passes its gradient on, as in threshold_backward: not (y <= 0).
    return y, pack_where(y, lambda part: (part <= 0).logical_not_())


def _hardtanh(
    x: torch.Tensor, low: float = -1.0, high: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_inside(ATEN.hardtanh(x, low, high), low, high)


def _hardtanh_over(
    x: torch.Tensor, low: float = -1.0, high: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_inside(ATEN.hardtanh_(x, low, high), low, high)


def _with_inside(y: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    return y, pack_where(y, lambda part: ((part <= low) | (part >= high)).logical_not_())


def _leaky(x: torch.Tensor, slope: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_positive(ATEN.leaky_relu(x, slope))


def _leaky_over(x: torch.Tensor, slope: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_positive(ATEN.leaky_relu_(x, slope))


def _with_positive(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Where x is: the slope is positive.
    return y, pack_where(y, lambda part: part > 0)


def _masked(g: torch.Tensor, bits: torch.Tensor) -> Any:
    return _masked_over(g.clone(), bits)


def _masked_over(g: torch.Tensor, bits: torch.Tensor) -> Any:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        flat[place].masked_fill_(mask.logical_not_(), 0)
    return g


def _scaled(g: torch.Tensor, bits: torch.Tensor, slope: float) -> Any:
    return _scaled_over(g.clone(), bits, slope)


def _scaled_over(g: torch.Tensor, bits: torch.Tensor, slope: float) -> Any:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        part = flat[place]
        torch.where(mask, part, part * slope, out=part)
    return g


def _from_output(g: torch.Tensor, y: torch.Tensor, low: float, high: float) -> Any:
    return ATEN.hardtanh_backward(g, y, low, high)


def _from_output_over(g: torch.Tensor, y: torch.Tensor, low: float, high: float) -> Any:
    return ATEN.hardtanh_backward(g, y, low, high, grad_input=g)


def _leaky_from_output(g: torch.Tensor, y: torch.Tensor, slope: float) -> Any:
    return ATEN.leaky_relu_backward(g, y, slope, True)


def _leaky_from_output_over(g: torch.Tensor, y: torch.Tensor, slope: float) -> Any:
    return ATEN.leaky_relu_backward(g, y, slope, True, grad_input=g)


def _relu_from_input(g: torch.Tensor, x: torch.Tensor) -> Any:
    return ATEN.threshold_backward(g, x, 0)


def _relu_from_input_over(g: torch.Tensor, x: torch.Tensor) -> Any:
    return ATEN.threshold_backward(g, x, 0, grad_input=g)


RELU = with_twin("relu.bitmask.2", _relu, _relu_over)
HARDTANH = with_twin("hardtanh.bitmask.2", _hardtanh, _hardtanh_over)
LEAKY = with_twin("leaky_relu.bitmask.2", _leaky, _leaky_over)
MASKED = with_twin("masked_gradient.bitmask.2", _masked, _masked_over)
SCALED = with_twin("scaled_gradient.bitmask.2", _scaled, _scaled_over)
HARDTANH_OUTPUT = with_twin("hardtanh_backward.output", _from_output, _from_output_over)
LEAKY_OUTPUT = with_twin("leaky_relu_backward.output", _leaky_from_output, _leaky_from_output_over)
RELU_INPUT = with_twin("relu_backward.input", _relu_from_input, _relu_from_input_over)


def _bits(sites: Sites, forward: Node, kernel: Kernel) -> Node:
    y = value_of(forward)
    bits = sites.extra(
        f"{forward.name}__bits", y.new_empty((packed_bytes(y.numel()),), dtype=torch.uint8)
    )
    # An eighth's comparisons and their shifted bits.
    scratch = 3 * packed_bytes(y.numel())
    sites.add(forward, "bitmask", kernel, forward.args, (forward, bits), workspace_bytes=scratch)
    return bits


def _original(x: Any) -> Any:
    """What is copied to `x`: an in-place hardtanh's backward reads a copy of its input, which need
    not be made for the alternatives."""
    while isinstance(x, Node) and str(x.target) == "aten.clone.default":
        x = x.args[0]
    return x


def _dense_gradient(backward: Node) -> bool:
    """The operator's result is laid out as ours is: contiguous, from contiguous arguments."""
    return bool(value_of(backward).is_contiguous() and value_of(backward.args[0]).is_contiguous())


def attach(sites: Sites) -> None:
    """ReLU, hardtanh (ReLU6) and leaky ReLU."""
    _attach_relu(sites)
    for backward in sites.calls(
        "aten.hardtanh_backward.default", "aten.leaky_relu_backward.default"
    ):
        relu6 = str(backward.target).startswith("aten.hardtanh")
        kernel = "aten.hardtanh.default" if relu6 else "aten.leaky_relu.default"
        g, x, *rest = backward.args
        limits: list[Any] = list(rest)
        if not relu6 and (limits[0] <= 0 or limits[1]):
            continue
        original = _original(x)
        forward = next((n for n in sites.calls(kernel) if n.args[0] is original), None)
        if (
            forward is None
            or not _dense_gradient(backward)
            or not value_of(forward).is_contiguous()
        ):
            continue
        bits = _bits(sites, forward, HARDTANH if relu6 else LEAKY)
        scratch = 2 * packed_bytes(value_of(forward).numel())
        if relu6:
            sites.add(backward, "bitmask", MASKED, (g, bits), workspace_bytes=scratch)
            sites.add(backward, "output", HARDTANH_OUTPUT, (g, forward, *limits))
        else:
            scratch += -(-value_of(forward).untyped_storage().nbytes() // 8)
            sites.add(backward, "bitmask", SCALED, (g, bits, limits[0]), workspace_bytes=scratch)
            sites.add(backward, "output", LEAKY_OUTPUT, (g, forward, limits[0]))


def _attach_relu(sites: Sites) -> None:
    for backward in sites.calls("aten.threshold_backward.default"):
        g, y, threshold = backward.args
        forward = sites.producer(y)
        if forward is None or str(forward.target) != "aten.relu.default" or threshold != 0:
            continue
        if not _dense_gradient(backward) or not value_of(forward).is_contiguous():
            continue
        bits = _bits(sites, forward, RELU)
        scratch = 2 * packed_bytes(value_of(forward).numel())
        sites.add(backward, "bitmask", MASKED, (g, bits), workspace_bytes=scratch)
        sites.add(backward, "input", RELU_INPUT, (g, forward.args[0]))

"""ReLU and its kin: the backward needs one bit per element, or the output, or the input.

Each writes over its first argument where a plan lets it (MONeT appendix C.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.bits import masks, pack_where, packed_bytes
from memopt.implementations.kernel import Kernel, overwriting, with_twin
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _with_bits(
    name: str,
    function: Callable[..., torch.Tensor],
    over: Callable[..., torch.Tensor],
    test: Callable[..., torch.Tensor],
) -> Kernel:
    """A kernel that returns a bit per element beside its result: what `test` says of that."""

    def keeping(run: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def kept(x: torch.Tensor, *options: float) -> tuple[torch.Tensor, torch.Tensor]:
            y = run(x, *options)
            return y, pack_where(y, lambda part: test(part, *options))

        return kept

    return with_twin(name, keeping(function), keeping(over))


def _inside(y: torch.Tensor, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    return ((y <= low) | (y >= high)).logical_not_()


def _masked_over(g: torch.Tensor, bits: torch.Tensor) -> Any:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        flat[place].masked_fill_(mask.logical_not_(), 0)
    return g


def _scaled_over(g: torch.Tensor, bits: torch.Tensor, slope: float) -> Any:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        part = flat[place]
        torch.where(mask, part, part * slope, out=part)
    return g


def _gradient(name: str, run: Callable[..., Any]) -> Kernel:
    """A backward of ATen's that can write over its first argument, by its overload for that."""
    return with_twin(name, run, lambda g, *rest: run(g, *rest, grad_input=g))


# A NaN passes its gradient on, as in threshold_backward: not (y <= 0).
RELU = _with_bits("relu.bitmask.2", ATEN.relu, ATEN.relu_, lambda y, *_: (y <= 0).logical_not_())
HARDTANH = _with_bits("hardtanh.bitmask.2", ATEN.hardtanh, ATEN.hardtanh_, _inside)
# Where the input is above 0, the output is: the slope is positive.
LEAKY = _with_bits("leaky_relu.bitmask.2", ATEN.leaky_relu, ATEN.leaky_relu_, lambda y, *_: y > 0)
MASKED = overwriting("masked_gradient.bitmask.2", _masked_over)
SCALED = overwriting("scaled_gradient.bitmask.2", _scaled_over)
HARDTANH_OUTPUT = _gradient("hardtanh_backward.output", ATEN.hardtanh_backward)
LEAKY_OUTPUT = _gradient(
    "leaky_relu_backward.output",
    lambda g, y, slope, **out: ATEN.leaky_relu_backward(g, y, slope, True, **out),
)
RELU_INPUT = _gradient(
    "relu_backward.input", lambda g, x, **out: ATEN.threshold_backward(g, x, 0, **out)
)


def _bits(sites: Sites, forward: Node, kernel: Kernel) -> Node:
    y = value_of(forward)
    bits = sites.bits(forward, y)
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

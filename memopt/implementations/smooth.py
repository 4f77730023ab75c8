"""ELU, softplus and hardsigmoid: one-to-one where their slope is not 0, so that the backward can
read the output, or a bit per element. GELU, SiLU, Mish and hardswish are not one-to-one: for them
only their input will do, and a plan that saves little runs their forward again.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.bits import pack, unpack
from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _elu(g: torch.Tensor, y: torch.Tensor, alpha: float, scale: float, inside: float) -> Any:
    return ATEN.elu_backward(g, alpha, scale, inside, True, y)


def _softplus(g: torch.Tensor, y: torch.Tensor, beta: float, threshold: float) -> Any:
    # dy/dx = 1 − exp(−βy); above the threshold y = x, and ATen's slope is 1.
    slope = torch.expm1(-beta * y).neg_()
    return torch.where(y * beta > threshold, g, slope.mul_(g))


def _hardsigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ATEN.hardsigmoid(x), pack((x > -3) & (x < 3))


def _hardsigmoid_masked(g: torch.Tensor, bits: torch.Tensor) -> Any:
    # ATen's own kernel, where the slope is 0 or not.
    inside = torch.where(unpack(bits, g.shape), torch.zeros((), dtype=g.dtype), 9.0)
    return ATEN.hardsigmoid_backward(g, inside.to(g.dtype))


ELU = Kernel("elu_backward.output", _elu)
SOFTPLUS = Kernel("softplus_backward.output", _softplus)
HARDSIGMOID = Kernel("hardsigmoid.bitmask", _hardsigmoid)
HARDSIGMOID_MASKED = Kernel("hardsigmoid_backward.bitmask", _hardsigmoid_masked)


def _dense(*nodes: Any) -> bool:
    return all(value_of(node).is_contiguous() for node in nodes)


def attach(sites: Sites) -> None:
    """ELU (and CELU, SELU) and softplus from their output; hardsigmoid from bits."""
    forwards = {
        (str(n.target), n.args[0]): n
        for n in sites.calls(
            "aten.elu.default", "aten.softplus.default", "aten.hardsigmoid.default"
        )
    }
    for backward in sites.calls("aten.elu_backward.default"):
        g, alpha, scale, inside, from_output, x = backward.args
        forward = forwards.get(("aten.elu.default", x))
        # A negative alpha's result has two inputs.
        if forward is None or from_output or alpha <= 0 or not _dense(g, forward):  # type: ignore[operator]  # a number
            continue
        sites.add(backward, "output", ELU, (g, forward, alpha, scale, inside), exact=False)
    for backward in sites.calls("aten.softplus_backward.default"):
        g, x, beta, threshold = backward.args
        forward = forwards.get(("aten.softplus.default", x))
        if forward is None or not _dense(g, forward):
            continue
        size = value_of(forward).untyped_storage().nbytes()
        given = (g, forward, beta, threshold)
        scratch = 3 * size
        sites.add(backward, "output", SOFTPLUS, given, workspace_bytes=scratch, exact=False)
    for backward in sites.calls("aten.hardsigmoid_backward.default"):
        g, x = backward.args
        forward = forwards.get(("aten.hardsigmoid.default", x))
        if forward is None or not _dense(g, forward):
            continue
        y = value_of(forward)
        bits = sites.bits(forward, y)
        scratch = 3 * y.numel()
        sites.add(forward, "bitmask", HARDSIGMOID, (x,), (forward, bits), workspace_bytes=scratch)
        scratch = y.numel() + 2 * y.untyped_storage().nbytes()
        sites.add(backward, "bitmask", HARDSIGMOID_MASKED, (g, bits), workspace_bytes=scratch)

"""Convolutions: in parts of the batch, to bound the workspace or to write over their operand; the
gradients of the input and of the weight as separate runs; a library's other algorithms.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from memopt.kernels.convolution_kernels import (
    CUDNN,
    FORWARD,
    INPUT,
    INPUT_SPLIT,
    KEEPING,
    NATIVE,
    NATIVE_BACKWARD,
    WEIGHT,
    WEIGHT_SPLIT,
)
from memopt.kernels.kernel import PARTS
from memopt.kernels.site import Sites, contiguous, part_bytes, storage_bytes, value_of

CONVOLUTION = "aten.convolution.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
LIBRARIES = (CUDNN, NATIVE, NATIVE_BACKWARD)
"""Kernels of `attach_libraries`."""
SPLITS = (2, PARTS)
"""Numbers of parts of the batch."""


def wanted(backward: Node) -> tuple[bool, bool, bool]:
    """Return whether a convolution's backward gives gradients of input, weight and bias."""
    mask: Any = backward.args[-1]
    return tuple(mask)


def attach(sites: Sites) -> None:
    """Attach alternatives to convolutions of contiguous images, and to those of their backwards
    that give the gradients of both input and weight."""
    for forward in sites.calls(CONVOLUTION):
        x, *more = forward.args
        for parts in SPLITS:
            if len(value_of(x)) >= parts and contiguous(x, forward):
                sites.add(
                    forward,
                    f"split {parts}",
                    FORWARD,
                    (x, parts, *more),
                    workspace_bytes=part_bytes(forward, parts),
                    exact=False,
                    like=1.0,
                    moved_bytes=2 * storage_bytes(forward),
                    parts=parts,
                )
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        if all(wanted(backward)[:2]):
            _attach_backward(sites, backward)


def _attach_backward(sites: Sites, backward: Node) -> None:
    given = backward.args[:-1]
    g, x, *more = given
    by_input, *by_weight = (sites.result(backward, i) for i in range(3))
    bias = wanted(backward)[2]
    many = len(value_of(x)) >= PARTS
    alone: Any = {"workspace_bytes": storage_bytes(more[0]), "like": 0.5, "parts": 1}
    # First the weight's: then its input can be freed.
    sites.add(
        backward, "weight gradient", WEIGHT, (bias, *given), tuple(by_weight), like=0.5, parts=1
    )
    if many:
        sites.add(
            backward,
            "weight gradient split",
            WEIGHT_SPLIT,
            (g, x, PARTS, bias, *more),
            tuple(by_weight),
            workspace_bytes=storage_bytes(more[0]),
            exact=False,
            like=0.5,
            parts=PARTS,
        )
    if not contiguous(x):
        sites.add(backward, "input gradient", KEEPING, tuple(given), (by_input,), **alone)
        return
    shape = tuple(value_of(x).shape)
    sites.add(backward, "input gradient", INPUT, (g, shape, *more), (by_input,), **alone)
    if many and contiguous(g):
        # Over the gradient, if the shapes are alike.
        sites.add(
            backward,
            "input gradient split",
            INPUT_SPLIT,
            (g, PARTS, shape, *more),
            (by_input,),
            workspace_bytes=part_bytes(x) + storage_bytes(more[0]),
            exact=False,
            like=0.5,
            moved_bytes=2 * storage_bytes(x),
            parts=PARTS,
        )


def attach_libraries(sites: Sites) -> None:
    """Attach libraries' other algorithms to convolutions of contiguous images: on the CPU ATen's
    own kernels in place of oneDNN's, on CUDA cuDNN's deterministic algorithms or the fastest of a
    trial. An estimate cannot tell them apart and leaves them out (`LIBRARIES`)."""
    for call in sites.calls(CONVOLUTION, CONVOLUTION_BACKWARD):
        if not contiguous(*call.all_input_nodes):
            continue
        backward = str(call.target) == CONVOLUTION_BACKWARD
        device = value_of(call.all_input_nodes[0]).device.type
        if device == "cuda":
            for name, benchmark in (("benchmarked", True), ("deterministic", False)):
                given = (benchmark, not benchmark, backward, *call.args)
                sites.add(call, name, CUDNN, given, exact=False, like=1.0)
        elif device == "cpu" and not sites.cuda_blocks:
            kernel = NATIVE_BACKWARD if backward else NATIVE
            sites.add(call, "native", kernel, call.args, exact=False, like=1.0)

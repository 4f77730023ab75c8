"""Convolutions by the other ways a library offers: on the CPU ATen's own kernels in place of
oneDNN's, on CUDA cuDNN's deterministic algorithms or the fastest of a trial.

An estimate cannot tell them apart, so that none is attached where the device is not the one that
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _native(operator: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return operator(*arguments)

    return run


def _cudnn(benchmark: bool, deterministic: bool, backward: bool, *arguments: Any) -> Any:
    operator = ATEN.convolution_backward if backward else ATEN.convolution
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=deterministic):
        return operator(*arguments)


NATIVE = Kernel("convolution.native", _native(ATEN.convolution))
NATIVE_BACKWARD = Kernel("convolution_backward.native", _native(ATEN.convolution_backward))
CUDNN = Kernel("convolution.cudnn", _cudnn)


def attach(sites: Sites) -> None:
    """Every convolution with contiguous images, on the device where the step was captured."""
    for call in sites.calls("aten.convolution.default", "aten.convolution_backward.default"):
        backward = str(call.target) == "aten.convolution_backward.default"
        values = [value_of(a) for a in call.all_input_nodes]
        if not all(v.is_contiguous() for v in values):
            continue
        own = values[0].device.type
        if own == "cuda":
            for name, benchmark in (("benchmarked", True), ("deterministic", False)):
                given = (benchmark, not benchmark, backward, *call.args)
                sites.add(call, name, CUDNN, given, exact=False, like=((call, 1.0),))
        elif own == "cpu" and not sites.cuda_blocks:
            kernel = NATIVE_BACKWARD if backward else NATIVE
            sites.add(call, "native", kernel, call.args, exact=False, like=((call, 1.0),))

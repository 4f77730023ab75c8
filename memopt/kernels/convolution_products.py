"""Convolutions as products of matrices, in two ways. By images' columns (im2col), image by image:
scratch memory holds one image's columns. By Fourier transforms, which take the fewest operations
for wide windows and the largest workspace (the spectra of images, weights and results).
Forward, input gradient and weight gradient are separate alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memopt.kernels.convolution import CONVOLUTION, CONVOLUTION_BACKWARD, wanted
from memopt.kernels.convolution_product_kernels import (
    Steps,
    columns_bytes,
    columns_forward,
    columns_input,
    columns_weight,
    spectra_bytes,
    spectra_fit,
    spectra_forward,
    spectra_input,
    spectra_weight,
)
from memopt.kernels.kernel import Kernel
from memopt.kernels.site import Sites, contiguous, storage_bytes, value_of


@dataclass(frozen=True)
class Products:
    """One way to compute a convolution x → y and its gradients.

    Attributes:
        name: of the alternatives.
        forward: of (x, weight, bias, shape of y, steps).
        input_gradient: of (gradient of y, weight, shape of x, steps).
        weight_gradient: of (whether a bias has one, gradient of y, x, shape of the weight, steps).
        fits: whether it can compute a plain convolution of (x, weight, steps).
        scratch_bytes: (x, weight, y, steps) → (scratch memory, that of the input gradient, bytes
            read and written there).
        sums_images: whether the weight gradient is a sum over images, in scratch memory.
    """

    name: str
    forward: Kernel
    input_gradient: Kernel
    weight_gradient: Kernel
    fits: Callable[[Any, Any, Steps], bool]
    scratch_bytes: Callable[[Any, Any, Any, Steps], tuple[int, int, int]]
    sums_images: bool


GEMM = Products(
    "gemm",
    Kernel("convolution.gemm", columns_forward),
    Kernel("convolution_backward.input.gemm", columns_input),
    Kernel("convolution_backward.weight.gemm", columns_weight),
    fits=lambda *_: True,
    scratch_bytes=columns_bytes,
    sums_images=True,
)
FFT = Products(
    "fft",
    Kernel("convolution.fft", spectra_forward),
    Kernel("convolution_backward.input.fft", spectra_input),
    Kernel("convolution_backward.weight.fft", spectra_weight),
    fits=spectra_fit,
    scratch_bytes=spectra_bytes,
    sums_images=False,
)


def _steps(way: Products, x: Any, weight: Any, y: Any, given: Any) -> Steps | None:
    """Return the steps of a plain convolution that a way can compute: two-dimensional, contiguous,
    one group and not transposed. `given`: its arguments from the stride to the groups."""
    stride, padding, dilation, transposed, _, groups = given
    steps, values = (stride, padding, dilation), (value_of(x), value_of(weight))
    plain = groups == 1 and not transposed and contiguous(x, weight, y)
    images = all(v.ndim == 4 and v.is_floating_point() for v in values)
    return steps if plain and images and way.fits(*values, steps) else None


def attach_products(way: Products, sites: Sites) -> None:
    """Attach one way's alternatives to the convolutions that it can compute, and to those of their
    backwards that give the gradients of both input and weight."""
    for forward in sites.calls(CONVOLUTION):
        x, weight, bias, *given = forward.args
        steps = _steps(way, x, weight, forward, given)
        if steps is None:
            continue
        y = value_of(forward)
        scratch, _, moved = way.scratch_bytes(value_of(x), value_of(weight), y, steps)
        sites.add(
            forward,
            way.name,
            way.forward,
            (x, weight, bias, tuple(y.shape), steps),
            workspace_bytes=scratch,
            exact=False,
            like=1.0,
            moved_bytes=moved,
        )
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        g, x, weight, _, *given, _ = backward.args
        by_input, by_weight, by_bias = wanted(backward)
        steps = _steps(way, x, weight, g, given)
        if steps is None or not (by_input and by_weight):
            continue
        scratch, of_input, moved = way.scratch_bytes(
            value_of(x), value_of(weight), value_of(g), steps
        )
        sums_bytes = 2 * storage_bytes(weight) if way.sums_images else 0
        results = tuple(sites.result(backward, i) for i in range(3))
        shapes = tuple(value_of(x).shape), tuple(value_of(weight).shape)
        for side, kernel, args, made, scratch_bytes in (
            ("weight", way.weight_gradient, (by_bias, g, x, shapes[1], steps),
             results[1 : 2 + by_bias], scratch + sums_bytes),
            ("input", way.input_gradient, (g, weight, shapes[0], steps), results[:1], of_input),
        ):  # fmt: skip
            sites.add(
                backward,
                f"{side} gradient {way.name}",
                kernel,
                args,
                made,
                workspace_bytes=scratch_bytes,
                exact=False,
                like=0.5,
                moved_bytes=moved,
            )

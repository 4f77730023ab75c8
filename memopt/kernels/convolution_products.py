"""Convolutions as products of matrices, in two ways. By images' columns (im2col), image by image:
scratch memory holds one image's columns. By Fourier transforms, which take the fewest operations
for wide windows and the largest workspace (the spectra of images, weights and results).
Forward, input gradient and weight gradient are separate alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memopt.kernels.convolution import CONVOLUTION, CONVOLUTION_BACKWARD, wanted
from memopt.kernels.kernel import Kernel
from memopt.kernels.site import Sites, contiguous, storage_bytes, value_of

ATEN = torch.ops.aten
_SMALLEST_WINDOW = 9
"""Smallest window, in positions, for which the transforms save more than they cost."""

Steps = tuple[Any, Any, Any]
"""(stride, padding, dilation)."""


def columns_forward(x: Tensor, weight: Tensor, bias: Any, shape: Any, steps: Steps) -> Tensor:
    """Compute y from x's columns."""
    stride, padding, dilation = steps
    result = x.new_empty(shape)
    rows = weight.flatten(1)
    for image, out in zip(x, result, strict=True):
        columns = ATEN.im2col(image[None], weight.shape[2:], dilation, padding, stride)[0]
        torch.mm(rows, columns, out=out.view(len(rows), -1))
        del columns  # not beside the next image's
    return result if bias is None else result.add_(bias.view(-1, 1, 1))


def columns_input(g: Tensor, weight: Tensor, shape: Any, steps: Steps) -> tuple[Tensor]:
    """Compute the gradient of the input, by columns."""
    stride, padding, dilation = steps
    result = g.new_empty(shape)
    rows = weight.flatten(1).t()
    for one, out in zip(g, result, strict=True):
        columns = (rows @ one.flatten(1))[None]
        out.copy_(ATEN.col2im(columns, shape[2:], weight.shape[2:], dilation, padding, stride)[0])
        del columns
    return (result,)


def columns_weight(bias: bool, g: Tensor, x: Tensor, shape: Any, steps: Steps) -> Any:
    """Compute the gradients of the weight and the bias, by columns."""
    stride, padding, dilation = steps
    wide = torch.float32 if g.dtype.itemsize < 4 else g.dtype
    total = g.new_zeros((shape[0], shape[1] * shape[2] * shape[3]), dtype=wide)
    for one, image in zip(g, x, strict=True):
        columns = ATEN.im2col(image[None], shape[2:], dilation, padding, stride)[0]
        total += one.flatten(1) @ columns.t()
        del columns
    return _with_bias(total.view(shape).to(g.dtype), g, bias)


def _with_bias(by_weight: Tensor, g: Tensor, bias: bool) -> tuple[Tensor, ...]:
    # A convolution's bias gradient is a plain sum.
    return (by_weight, g.sum((0, 2, 3))) if bias else (by_weight,)


def columns_bytes(x: Any, weight: Any, y: Any, _: Steps) -> tuple[int, int, int]:
    """Return the bytes of one image and its columns (weights of a filter × positions); of columns
    and the copy that torch's col2im makes; and those moved."""
    columns = int(weight[0].numel() * y[0, 0].numel() * y.element_size())
    return columns + x[0].nbytes, 2 * columns, 2 * columns * x.shape[0]


def _spectrum(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return [frequencies, first, second] of a tensor [first, second, rows, columns]."""
    return torch.fft.rfft2(x, s=size).permute(2, 3, 0, 1).reshape(-1, *x.shape[:2])  # type: ignore[no-any-return]


def _back(spectrum: Tensor, size: tuple[int, int]) -> Tensor:
    shape = (size[0], size[1] // 2 + 1, *spectrum.shape[1:])
    return torch.fft.irfft2(spectrum.view(shape).permute(2, 3, 0, 1), s=size)  # type: ignore[no-any-return]


def _padded(x: Tensor, padding: Any) -> tuple[Tensor, tuple[int, int]]:
    rows, columns = padding
    wide = functional.pad(x, (columns, columns, rows, rows))
    return wide, (wide.shape[2], wide.shape[3])


def spectra_forward(x: Tensor, weight: Tensor, bias: Any, shape: Any, steps: Steps) -> Tensor:
    """Compute y by Fourier transforms."""
    wide, size = _padded(x, steps[1])
    filters = _spectrum(weight, size).conj().transpose(1, 2)
    found = _back(_spectrum(wide, size) @ filters, size)[..., : shape[2], : shape[3]]
    return found.contiguous() if bias is None else found + bias.view(-1, 1, 1)


def spectra_input(g: Tensor, weight: Tensor, shape: Any, steps: Steps) -> tuple[Tensor]:
    """Compute the gradient of the input, by Fourier transforms."""
    padding = steps[1]
    size = (shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])
    found = _back(_spectrum(g, size) @ _spectrum(weight, size), size)
    rows = slice(padding[0], padding[0] + shape[2])
    columns = slice(padding[1], padding[1] + shape[3])
    return (found[..., rows, columns].contiguous(),)


def spectra_weight(bias: bool, g: Tensor, x: Tensor, shape: Any, steps: Steps) -> Any:
    """Compute the gradients of the weight and the bias, by Fourier transforms."""
    wide, size = _padded(x, steps[1])
    left = _spectrum(g, size).conj().transpose(1, 2)
    found = _back(left @ _spectrum(wide, size), size)[..., : shape[2], : shape[3]].contiguous()
    return _with_bias(found, g, bias)


def spectra_fit(x: Any, weight: Any, steps: Steps) -> bool:
    """Return whether stride and dilation are 1, the window large, in single or double precision."""
    stride, _, dilation = steps
    known = x.dtype in (torch.float32, torch.float64)
    return {*stride, *dilation} == {1} and known and weight[0, 0].numel() >= _SMALLEST_WINDOW


def spectra_bytes(x: Any, weight: Any, y: Any, steps: Steps) -> tuple[int, int, int]:
    """Return the bytes of three spectra (a complex number for two padded positions of every plane)
    and a copy of each in the order of frequencies, twice; and the bytes moved."""
    padding = steps[1]
    rows, columns = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
    planes = x.shape[0] * x.shape[1] + weight.shape[0] * weight.shape[1] + y.shape[0] * y.shape[1]
    spectra = int(planes * rows * (columns // 2 + 1) * 2 * x.element_size())
    return 2 * spectra, 2 * spectra, 4 * spectra


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

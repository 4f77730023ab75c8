"""Convolutions as products of Fourier transforms: fewest operations for wide windows, and the
largest workspace (the spectra of images, weights and results).

With images padded to H rows, a circular transform of length H gives the rows that a convolution
of stride 1 has; the others, wrapped, are cut off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from memopt.implementations.convolution_products import Products, Steps, attach_products
from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

_SMALLEST_WINDOW = 9
"""Positions of a window below which the transforms cost more than they save."""


def _spectrum(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[frequencies, first, second] of a tensor [first, second, rows, columns]."""
    found: torch.Tensor = torch.fft.rfft2(x, s=size)
    return found.permute(2, 3, 0, 1).reshape(-1, *x.shape[:2])


def _back(spectrum: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    shape = (size[0], size[1] // 2 + 1, *spectrum.shape[1:])
    found: torch.Tensor = torch.fft.irfft2(spectrum.view(shape).permute(2, 3, 0, 1), s=size)
    return found


def _padded(x: torch.Tensor, padding: Any) -> tuple[torch.Tensor, tuple[int, int]]:
    rows, columns = padding
    wide = functional.pad(x, (columns, columns, rows, rows))
    return wide, (wide.shape[2], wide.shape[3])


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: Any, shape: Any, steps: Steps) -> Any:
    wide, size = _padded(x, steps[1])
    filters = _spectrum(weight, size).conj().transpose(1, 2)
    found = _back(_spectrum(wide, size) @ filters, size)[..., : shape[2], : shape[3]]
    return found.contiguous() if bias is None else found + bias.view(-1, 1, 1)


def _input_gradient(g: torch.Tensor, weight: torch.Tensor, shape: Any, steps: Steps) -> Any:
    padding = steps[1]
    size = (shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])
    found = _back(_spectrum(g, size) @ _spectrum(weight, size), size)
    rows = slice(padding[0], padding[0] + shape[2])
    columns = slice(padding[1], padding[1] + shape[3])
    return (found[..., rows, columns].contiguous(),)


def _weight_gradient(bias: bool, g: torch.Tensor, x: torch.Tensor, shape: Any, steps: Steps) -> Any:
    wide, size = _padded(x, steps[1])
    left = _spectrum(g, size).conj().transpose(1, 2)
    found = _back(left @ _spectrum(wide, size), size)[..., : shape[2], : shape[3]].contiguous()
    return (found, g.sum((0, 2, 3))) if bias else (found,)


def _fits(x: Any, weight: Any, steps: Steps) -> bool:
    """Stride and dilation 1, single or double precision, a window worth it."""
    stride, _, dilation = steps
    return bool(
        set(stride) == {1}
        and set(dilation) == {1}
        and value_of(x).dtype in (torch.float32, torch.float64)
        and value_of(weight)[0, 0].numel() >= _SMALLEST_WINDOW
    )


def _scratch_bytes(x: Any, weight: Any, y: Any, steps: Steps) -> tuple[int, int]:
    """Three spectra, a complex number for two padded positions of every plane, and a copy of each
    in the order of frequencies."""
    padding = steps[1]
    rows, columns = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
    planes = x.shape[0] * x.shape[1] + weight.shape[0] * weight.shape[1] + y.shape[0] * y.shape[1]
    spectra = int(planes * rows * (columns // 2 + 1) * 2 * x.element_size())
    return 2 * spectra, 4 * spectra


FFT = Products(
    "fft",
    Kernel("convolution.fft", _forward),
    Kernel("convolution_backward.input.fft", _input_gradient),
    Kernel("convolution_backward.weight.fft", _weight_gradient),
    _fits,
    _scratch_bytes,
    sums_images=False,
)


def attach(sites: Sites) -> None:
    """Plain two-dimensional convolutions of stride 1 and windows of at least 3 × 3."""
    attach_products(sites, FFT)

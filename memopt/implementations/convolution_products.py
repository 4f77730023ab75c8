"""Convolutions as products of matrices: what the ways to do it share, of images' columns
(`convolution_gemm`) and of spectra (`convolution_fft`). Forward, input gradient and weight gradient
are alternatives of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

Steps = tuple[Any, Any, Any]
"""(stride, padding, dilation)."""


@dataclass(frozen=True)
class Products:
    """One way to compute a convolution x → y and its gradients.

    Attributes:
        name: of the alternatives.
        forward: kernel of (x, weight, bias, shape of y, steps).
        input_gradient: kernel of (gradient of y, weight, shape of x, steps).
        weight_gradient: kernel of (whether a bias has one, gradient of y, x, shape of the weight,
            steps).
        fits: whether it can compute a plain convolution of (x, weight, steps).
        scratch_bytes: of (x, weight, y, steps): (scratch memory, bytes read and written there).
        sums_images: whether the weight gradient is a sum over images, in scratch memory.
    """

    name: str
    forward: Kernel
    input_gradient: Kernel
    weight_gradient: Kernel
    fits: Callable[[Any, Any, Steps], bool]
    scratch_bytes: Callable[[Any, Any, Any, Steps], tuple[int, int]]
    sums_images: bool


def _plain(x: Any, weight: Any, transposed: Any, groups: Any) -> bool:
    """Two-dimensional, contiguous, of one group and not transposed."""
    values = (value_of(x), value_of(weight))
    return bool(
        groups == 1
        and not transposed
        and all(v.ndim == 4 and v.is_contiguous() and v.is_floating_point() for v in values)
    )


def attach_products(sites: Sites, way: Products) -> None:
    """Plain two-dimensional convolutions that fit, and their backwards that give both gradients."""
    for forward in sites.calls("aten.convolution.default"):
        x, weight, bias, *given, transposed, _, groups = forward.args
        steps: Any = tuple(given)
        y = value_of(forward)
        if not _plain(x, weight, transposed, groups) or not way.fits(x, weight, steps):
            continue
        if not y.is_contiguous():
            continue
        scratch, moved = way.scratch_bytes(value_of(x), value_of(weight), y, steps)
        sites.add(
            forward,
            way.name,
            way.forward,
            (x, weight, bias, tuple(y.shape), steps),
            workspace_bytes=scratch,
            exact=False,
            like=((forward, 1.0),),
            moved_bytes=moved,
        )
    for backward in sites.calls("aten.convolution_backward.default"):
        _attach_backward(sites, way, backward)


def _attach_backward(sites: Sites, way: Products, backward: Node) -> None:
    g, x, weight, _, *given, transposed, _, groups, mask = backward.args
    steps: Any = tuple(given)
    needs: list[bool] = list(mask)  # type: ignore[arg-type]  # a list of booleans
    if not (needs[0] and needs[1]) or not _plain(x, weight, transposed, groups):
        return
    if not value_of(g).is_contiguous() or not way.fits(x, weight, steps):
        return
    results = [sites.result(backward, i) for i in range(3)]
    scratch, moved = way.scratch_bytes(value_of(x), value_of(weight), value_of(g), steps)
    sums_bytes = 2 * value_of(weight).untyped_storage().nbytes() if way.sums_images else 0
    half = ((backward, 0.5),)
    sites.add(
        backward,
        f"weight gradient {way.name}",
        way.weight_gradient,
        (needs[2], g, x, tuple(value_of(weight).shape), steps),
        (results[1], results[2]) if needs[2] else (results[1],),
        workspace_bytes=scratch + sums_bytes,
        exact=False,
        like=half,
        moved_bytes=moved,
    )
    sites.add(
        backward,
        f"input gradient {way.name}",
        way.input_gradient,
        (g, weight, tuple(value_of(x).shape), steps),
        (results[0],),
        workspace_bytes=scratch,
        exact=False,
        like=half,
        moved_bytes=moved,
    )

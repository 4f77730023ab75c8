"""cuDNN's seven algorithms of a convolution as data (MONeT appendix G, figure 7), for estimates.

The paper draws their times and workspaces without numbers. Here workspaces follow from what each
algorithm keeps: columns, transformed tiles, or spectra. Times, over that of the default, stand for
the multiplications that it saves (Lavin, Gray: Fast Algorithms for Convolutional Neural Networks,
2016; Mathieu, Henaff, LeCun: Fast Training of Convolutional Networks through FFTs, 2014), about
half of which its transforms cost. They are assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.models.graph import Graph, Implementation, Operator


@dataclass(frozen=True)
class PlainConvolution:
    """A convolution of stride 1 and one group: elements of its input, weight and result."""

    images: int
    channels: int
    results: int
    pixels: int
    window: int

    @property
    def elements(self) -> tuple[int, int, int]:
        per_image = self.images * self.pixels
        weight = self.channels * self.results * self.window**2
        return per_image * self.channels, weight, per_image * self.results


def _spectra(c: PlainConvolution) -> float:
    # Half of the frequencies of real numbers, each complex.
    x, _, y = c.elements
    return x + y + c.channels * c.results * c.pixels


def _tiles(c: PlainConvolution) -> float:
    x, _, y = c.elements
    return (x + y) * (32 / (33 - c.window)) ** 2 + c.channels * c.results * 32 * 17 * 2


def _winograd(c: PlainConvolution) -> float:
    x, weight, y = c.elements
    tile = (4 + c.window - 1) ** 2
    return (x + y) * tile / 16 + weight * tile / c.window**2


DEFAULT = "precomputed gemm"
MENU: dict[str, tuple[dict[int, float], Callable[[PlainConvolution], float]]] = {
    "implicit gemm": ({1: 1.4, 3: 1.4, 5: 1.4}, lambda _: 0),
    DEFAULT: ({1: 1.0, 3: 1.0, 5: 1.0}, lambda _: 0),
    "gemm": ({3: 0.95, 5: 0.95}, lambda c: c.elements[0] * c.window**2),
    "winograd": ({3: 0.7}, lambda c: c.elements[1] * 16 / 9),
    "winograd, not fused": ({3: 0.55, 5: 0.6}, _winograd),
    "fft": ({3: 0.9, 5: 0.5}, _spectra),
    "fft, tiled": ({3: 0.8, 5: 0.55}, _tiles),
}
"""Algorithm → its time over the default's by the window's width, and its workspace in elements."""


def choices(c: PlainConvolution) -> Iterator[tuple[str, float, int]]:
    """Yield (algorithm, time over the default's, workspace in bytes of float32) of those that
    apply."""
    for name, (times, elements) in MENU.items():
        if c.window in times:
            yield name, times[c.window], int(4 * elements(c))


def convolutions(model: nn.Module, images: torch.Tensor) -> dict[str, PlainConvolution]:
    """Find the convolutions that the menu is for, by the names of their modules; on meta."""
    found: dict[str, PlainConvolution] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: Any, inputs: Any, y: torch.Tensor) -> None:
            x = inputs[0]
            if layer.stride == (1, 1) and layer.groups == 1 and x.shape[2:] == y.shape[2:]:
                pixels, window = y.shape[2] * y.shape[3], layer.kernel_size[0]
                found[name] = PlainConvolution(len(x), x.shape[1], y.shape[1], pixels, window)

        return hook

    for name, layer in model.named_modules():
        if type(layer) is nn.Conv2d and len(set(layer.kernel_size)) == 1:
            layer.register_forward_hook(note(name))
    model(images)
    return found


def with_menu(graph: Graph, known: dict[str, PlainConvolution]) -> Graph:
    """Give convolutions the algorithms that none beats in both time and workspace, forward and for
    each gradient; they count as exact, as in the paper."""
    return replace(graph, operators=[_with(x, known.get(x.module)) for x in graph.operators])


def _with(operator: Operator, shape: PlainConvolution | None) -> Operator:
    if shape is None or "convolution" not in operator.target:
        return operator
    found, least = list(choices(shape)), 1.0
    useful = []
    for name, time, size in sorted(found, key=lambda one: (one[2], one[1])):
        if time < least:
            useful.append((name, time, size))
            least = time
    own = Implementation("", operator.time_s)
    bases = [own, *(x for x in operator.implementations if x.name.endswith("t gradient"))]
    more = [
        replace(
            base,
            name=f"{base.name} {name}".strip(),
            time_s=base.time_s * time,
            workspace_bytes=size,
        )
        for base in bases
        for name, time, size in useful
    ]
    return replace(operator, implementations=(*operator.implementations, *more))

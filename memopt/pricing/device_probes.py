"""Kernels that measure the present machine's rates, and the function that times one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memopt.step.backend import backend_of
from memopt.torch_private.operators import aten

_BUDGET_S = 0.05
STREAM_ELEMENTS, STREAMS = 2**19, 16

Run = Callable[[], Any]

Probes = dict[str, tuple[float, Run]]
"""Kind of operator → operations per run (as `flops.work` counts them) and the run."""


def best_s(place: torch.device, run: Run, kernels: int = 1) -> float:
    """Return the seconds of the fastest run within `_BUDGET_S`, after two warm-up runs. On a device
    each begins with cold caches, in a busy queue (`seconds_of`).

    Args:
        place: where it runs.
        run: launches so many kernels on the current stream.
        kernels: their number.
    """
    return fastest_s(run, lambda: seconds_of(lambda _: run(), place, 1, kernels))


def fastest_s(run: Run, timing: Callable[[], float]) -> float:
    """Return the least seconds that `timing` measures within `_BUDGET_S`, after two warm-up
    runs."""
    run()
    run()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _BUDGET_S:
        best = min(best, timing())
    return best


def convolution_probes(place: torch.device, scale: int) -> Probes:
    """Return probes of convolutions, dense and depthwise, and of the depthwise backward."""
    image = torch.rand(2 * scale, 64, 56, 56, device=place)
    filters, depth = (torch.rand(64, n, 3, 3, device=place) for n in (64, 1))
    shape = [[1, 1], [1, 1], [1, 1], False, [0, 0]]
    each = 2.0 * image.numel() * 9
    both = [True, True, False]
    return {
        "convolution": (64 * each, lambda: aten.convolution(image, filters, None, *shape, 1)),
        "depthwise": (each, lambda: aten.convolution(image, depth, None, *shape, 64)),
        "depthwise backward": (
            2 * each,
            lambda: aten.convolution_backward(image, image, depth, [0], *shape, 64, both),
        ),
    }


def image_probes(place: torch.device, scale: int) -> Probes:
    """Return probes of other kernels on images."""
    image = torch.rand(2 * scale, 64, 56, 56, device=place)
    one = torch.ones(64, device=place)
    window = [[3, 3], [2, 2], [1, 1]]
    pooled, where = aten.max_pool2d_with_indices(image, *window)
    n, every = float(image.numel()), [True, True, True]
    return {
        "random": (n, lambda: aten.native_dropout(image, 0.1, True)),
        "tanh": (n, lambda: torch.tanh(image)),
        "activation": (n, lambda: aten.gelu(image)),
        "batch norm": (
            n,
            lambda: aten._native_batch_norm_legit_functional(
                image, one, one, one, one, True, 0.1, 1e-5
            ),
        ),
        "batch norm backward": (
            n,
            lambda: aten.native_batch_norm_backward(
                image, image, one, one, one, one, one, True, 1e-5, every
            ),
        ),
        "pool": (9.0 * pooled.numel(), lambda: aten.max_pool2d_with_indices(image, *window)),
        "pool backward": (
            n,
            lambda: aten.max_pool2d_with_indices_backward(
                pooled, image, *window, [1, 1], False, where
            ),
        ),
    }


def row_probes(place: torch.device, scale: int) -> Probes:
    """Return probes of kernels on rows of features."""
    rows = torch.rand(512 * scale, 768, device=place)
    width = torch.ones(768, device=place)
    heads = torch.rand(scale, 12, 512, 64, device=place)
    scores = torch.rand(12 * scale, 512, 512, device=place)
    indices = torch.randint(0, 2048, (512 * scale,), device=place)
    _, mean, deviation = aten.native_layer_norm(rows, [768], width, width, 1e-5)
    n, every = float(rows.numel()), [True, True, True]
    return {
        "attention": (
            4.0 * heads.numel() * 512,
            lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
        ),
        "softmax": (float(scores.numel()), lambda: aten._safe_softmax(scores, -1)),
        "layer norm": (n, lambda: aten.native_layer_norm(rows, [768], width, width, 1e-5)),
        "layer norm backward": (
            n,
            lambda: aten.native_layer_norm_backward(
                rows, rows, [768], mean, deviation, width, width, every
            ),
        ),
        "scatter": (
            2048.0 * 768,
            lambda: aten.embedding_dense_backward(rows, indices, 2048, -1, False),
        ),
    }


PROBES = (convolution_probes, image_probes, row_probes)

_KERNELS_PER_WRITE = 4
"""Kernels that the host enqueues, at 20 us each, while a GPU writes 256 MiB."""


def seconds_of(
    run: Callable[[int], object], device: torch.device, repeats: int, kernels: int = 1
) -> float:
    """Return the seconds that `repeats` calls in a row take, of which each is given its number.

    On a device they wait in its queue behind writes that empty its caches, so that it never waits
    for the host. On the host they are timed as they are.

    Args:
        run: launches kernels on the device's current stream.
        device: where.
        repeats: at least 1.
        kernels: how many `run` launches.
    """
    backend = backend_of(device)
    runtime = backend.runtime
    if runtime is None:
        begin = time.perf_counter()
        for number in range(repeats):
            run(number)
        return time.perf_counter() - begin
    start, end = runtime.Event(enable_timing=True), runtime.Event(enable_timing=True)
    if backend.cache_bytes:
        lines = torch.empty(backend.cache_bytes, dtype=torch.uint8, device=device)
        for _ in range(1 + repeats * kernels // _KERNELS_PER_WRITE):
            lines.zero_()
    stream = runtime.current_stream(device)  # of the model's device, whichever is current
    start.record(stream)
    for number in range(repeats):
        run(number)
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3

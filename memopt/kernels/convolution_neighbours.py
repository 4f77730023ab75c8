"""Gradients of convolutions that include neighbouring operators.

The weight gradient of a convolution whose input is recomputed in parts of the batch: from the
input of the convolution before it, through batch norm with its known statistics and ReLU. So the
input never exists whole in the backward, and the incoming gradient is the largest tensor.

The input gradient of a convolution behind a concatenation, in the parts that are read. Autograd
hands the parts on as views, so that the whole gradient stays until its last part is read: in a
U-Net the skips' parts wait for the encoder. Here each part is a tensor of its own, and the whole
gradient exists for one part of the batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.batch_norm import BATCH_AGAIN, BATCH_NORM
from memopt.kernels.convolution import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    input_gradient,
    summed_weight_gradients,
    wanted,
)
from memopt.kernels.kernel import PARTS, Kernel, split
from memopt.kernels.site import Sites, contiguous, part_bytes, storage_bytes, value_of

ATEN = torch.ops.aten


def _weight_gradient(
    g: Tensor, u: Tensor, convolution: Any, norm: Any, relu: bool, parts: int, *more: Any
) -> Any:
    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for part in split(len(g), parts):
            x = ATEN.convolution(u[part], *convolution)
            if norm is not None:
                (x,) = BATCH_AGAIN.over(x, *norm)  # type: ignore[misc]  # it has one
            yield g[part], ATEN.relu_(x) if relu else x

    return summed_weight_gradients(pieces(), *more)


def _input_gradient_parts(g: Tensor, parts: int, shape: Any, ranges: Any, *arguments: Any) -> Any:
    results = [g.new_empty((shape[0], end - begin, *shape[2:])) for begin, end in ranges]
    for part in split(len(g), parts):
        (whole,) = input_gradient(g[part], (len(g[part]), *shape[1:]), *arguments)
        for result, (begin, end) in zip(results, ranges, strict=True):
            result[part] = whole[:, begin:end]
    return tuple(results)


WEIGHT = Kernel("convolution_backward.weight.again", _weight_gradient)
INPUT_PARTS = Kernel("convolution_backward.input.parts", _input_gradient_parts)


def attach_again(sites: Sites) -> None:
    """Attach to a convolution's backward an alternative that recomputes its input from the
    convolution before, through batch norm and ReLU if they lie between."""
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        g, x, *arguments, _ = backward.args
        relu = sites.producer(x, "aten.relu.default")
        normed = relu.args[0] if relu is not None else x
        norm = sites.producer(normed, BATCH_NORM)
        made = sites.producer(norm.args[0] if norm is not None else normed, CONVOLUTION)
        by_input, by_weight, by_bias = wanted(backward)
        if not by_weight or made is None or len(value_of(x)) < PARTS:
            continue
        u, *convolution = made.args
        if not contiguous(g, x, u):
            continue
        statistics = None
        if norm is not None:
            mean, inverse = (sites.result(norm, i) for i in (1, 2))
            if mean is None or value_of(x).dtype != value_of(mean).dtype or inverse is None:
                continue
            statistics = (*norm.args[1:3], mean, inverse)
        again = tuple((call, 1.0) for call in (made, norm, relu) if call is not None)
        sites.add(
            backward,
            "weight gradient again",
            WEIGHT,
            (g, u, tuple(convolution), statistics, relu is not None, PARTS, by_bias, *arguments),
            (sites.result(backward, 1), sites.result(backward, 2)),
            workspace_bytes=part_bytes(x) + storage_bytes(arguments[0]),
            exact=False,
            like=((backward, 0.5 if by_input else 1.0), *again),
            parts=PARTS,
        )


def _slices(sites: Sites, gradient: Node) -> dict[Node, tuple[int, int]] | None:
    """Return the views of channels through which a gradient is read, each with its channels; None
    if it is read in another way, or whole."""
    channels = value_of(gradient).shape[1]
    found: dict[Node, tuple[int, int]] = {}
    for reader in sites.readers(gradient):
        for view in reader.all_input_nodes:
            if not sites.looks_into(view, gradient):
                continue
            if str(view.target) != "aten.slice.Tensor" or view.args[0] is not gradient:
                return None
            _, dim, begin, end, *step = view.args
            if not (isinstance(begin, int) and isinstance(end, int)):
                return None
            if dim != 1 or step or reader.kwargs:
                return None
            found[view] = (begin, min(end, channels))
    ranges = sorted(found.values())
    disjoint = all(a[1] <= b[0] for a, b in pairwise(ranges))
    return found if len(found) > 1 and disjoint else None


def attach_parts(sites: Sites) -> None:
    """Attach to a convolution's backward an alternative that computes its input gradient in slices
    of channels, where only slices of it are read."""
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        g, x, *arguments, _ = backward.args
        gradient = sites.result(backward, 0) if all(wanted(backward)[:2]) else None
        if gradient is None or not contiguous(g, x):
            continue
        slices, value = _slices(sites, gradient), value_of(x)
        if slices is None or len(value) < PARTS:
            continue
        parts = {
            view: sites.extra(
                f"{gradient.name}__channels{begin}", value.new_empty(tuple(value_of(view).shape))
            )
            for view, (begin, _) in slices.items()
        }
        sites.add(
            backward,
            "input gradient parts",
            INPUT_PARTS,
            (g, PARTS, tuple(value.shape), tuple(slices.values()), *arguments),
            tuple(parts.values()),
            workspace_bytes=part_bytes(x),
            exact=False,
            like=0.5,
            moved_bytes=2 * storage_bytes(x),
            parts=PARTS,
        )
        for view, part in parts.items():
            _attach_reader(sites, gradient, view, part)


def _attach_reader(sites: Sites, gradient: Node, view: Node, part: Node) -> None:
    """Attach to the readers of one slice an alternative that reads the part; it is as exact as the
    part."""
    for reader in sites.readers(gradient):
        if view not in reader.all_input_nodes:
            continue
        args = tuple(part if a is view else a for a in reader.args)
        name, over = str(reader.target), None
        if reader.target is ATEN.add.Tensor and len(args) == 2:
            # A sum may be written over its other term.
            over = Kernel(f"{name}.of_part.over", ATEN.add_.Tensor)
            args = args if args[1] is part else (args[1], args[0])
        kernel = Kernel(f"{name}.of_part", reader.target, over)  # type: ignore[arg-type]  # a kernel
        sites.add(reader, "of a part", kernel, args, exact=False, like=1.0)

"""The input gradient of a convolution behind a concatenation, in the parts that are read.

Autograd hands the parts on as views, so that all of the gradient stays until its last part is
read: in a U-Net the skips' parts wait for the encoder. Here each part is a tensor of its own, and
the whole gradient exists for one part of the batch at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.convolution import input_gradient
from memopt.implementations.kernel import Kernel
from memopt.implementations.parts import PARTS, part_bytes, split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _apart(g: torch.Tensor, parts: int, shape: Any, ranges: Any, *arguments: Any) -> Any:
    results = [g.new_empty((shape[0], end - begin, *shape[2:])) for begin, end in ranges]
    for part in split(len(g), parts):
        (whole,) = input_gradient(g[part], (len(g[part]), *shape[1:]), *arguments)
        for result, (begin, end) in zip(results, ranges, strict=True):
            result[part] = whole[:, begin:end]
    return tuple(results)


APART = Kernel("convolution_backward.input.parts", _apart)


def _slices(sites: Sites, gradient: Node) -> dict[Node, tuple[int, int]] | None:
    """The views of channels through which a gradient is read, each with its channels; None if it
    is read in another way, or whole."""
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
    apart = all(a[1] <= b[0] for a, b in pairwise(ranges))
    return found if len(found) > 1 and apart else None


def attach(sites: Sites) -> None:
    """Contiguous convolutions whose input gradient is read in slices of its channels only."""
    for backward in sites.calls("aten.convolution_backward.default"):
        g, x, *arguments, mask = backward.args
        gradient = sites.result(backward, 0) if mask[0] and mask[1] else None  # type: ignore[index]  # a list of booleans
        if gradient is None or not all(value_of(n).is_contiguous() for n in (g, x)):
            continue
        slices = _slices(sites, gradient)
        if slices is None or len(value_of(x)) < PARTS:
            continue
        parts = {
            view: sites.extra(
                f"{gradient.name}__channels{begin}",
                value_of(x).new_empty(tuple(value_of(view).shape)),
            )
            for view, (begin, _) in slices.items()
        }
        sites.add(
            backward,
            "input gradient parts",
            APART,
            (g, PARTS, tuple(value_of(x).shape), tuple(slices.values()), *arguments),
            tuple(parts.values()),
            workspace_bytes=part_bytes(value_of(x)),
            exact=False,
            like=((backward, 0.5),),
            moved_bytes=2 * value_of(x).untyped_storage().nbytes(),
        )
        for view, part in parts.items():
            _attach_reader(sites, gradient, view, part)


def _attach_reader(sites: Sites, gradient: Node, view: Node, part: Node) -> None:
    """What reads one slice can read the part: as exact as the part."""
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
        sites.add(reader, "of a part", kernel, args, exact=False, like=((reader, 1.0),))

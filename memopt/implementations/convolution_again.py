"""The weight gradient of a convolution whose input is made again in parts of the batch: from the
input of the convolution before it, through batch norm with its known statistics and ReLU. So the
input never exists whole in the backward, and the gradient that is read is the largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations import batch_norm
from memopt.implementations.convolution import summed_weight_gradients
from memopt.implementations.kernel import Kernel
from memopt.implementations.parts import PARTS, part_bytes, split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _weight_gradient(
    g: torch.Tensor,
    u: torch.Tensor,
    convolution: Any,
    norm: Any,
    relu: bool,
    parts: int,
    bias: bool,
    *arguments: Any,
) -> Any:
    def pieces() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in split(len(g), parts):
            x = ATEN.convolution(u[part], *convolution)
            if norm is not None:
                (x,) = batch_norm.AGAIN.over(x, *norm)  # type: ignore[misc]  # it has one
            yield g[part], ATEN.relu_(x) if relu else x

    return summed_weight_gradients(pieces(), bias, *arguments)


WEIGHT = Kernel("convolution_backward.weight.again", _weight_gradient)


@dataclass(frozen=True)
class _Made:
    """How a convolution's input is made: its own convolution, batch norm (or None), ReLU or not."""

    convolution: Node
    norm: Node | None
    relu: Node | None

    @property
    def calls(self) -> tuple[Node, ...]:
        """What is run again."""
        return tuple(n for n in (self.convolution, self.norm, self.relu) if n is not None)


def _made(sites: Sites, x: Any) -> _Made | None:
    """The operators behind a tensor; None if they are others, or are all run once only."""
    found = sites.producer(x)
    relu = norm = None
    if found is not None and str(found.target) == "aten.relu.default":
        relu, found = found, sites.producer(found.args[0])
    if found is not None and str(found.target) == batch_norm.FORWARD:
        norm, found = found, sites.producer(found.args[0])
    if found is None or str(found.target) != "aten.convolution.default":
        return None
    return _Made(found, norm, relu)


def attach(sites: Sites) -> None:
    """Contiguous convolutions behind a convolution, with or without batch norm and ReLU between."""
    for backward in sites.calls("aten.convolution_backward.default"):
        g, x, *arguments, mask = backward.args
        needs: list[bool] = list(mask)  # type: ignore[arg-type]  # a list of booleans
        made = _made(sites, x)
        if not needs[1] or made is None or len(value_of(x)) < PARTS:
            continue
        u = made.convolution.args[0]
        if not all(value_of(n).is_contiguous() for n in (g, x, u)):
            continue
        norm = None
        if made.norm is not None:
            mean, inverse = (sites.result(made.norm, i) for i in (1, 2))
            if mean is None or value_of(x).dtype != value_of(mean).dtype or inverse is None:
                continue
            norm = (*made.norm.args[1:3], mean, inverse)
        weight, bias = (sites.result(backward, i) for i in (1, 2))
        weight_bytes = value_of(arguments[0]).untyped_storage().nbytes()
        share = 0.5 if needs[0] else 1.0
        relu = made.relu is not None
        sites.add(
            backward,
            "weight gradient again",
            WEIGHT,
            (g, u, made.convolution.args[1:], norm, relu, PARTS, needs[2], *arguments),
            (weight, bias) if needs[2] else (weight, None),
            workspace_bytes=part_bytes(value_of(x)) + weight_bytes,
            exact=False,
            like=((backward, share), *((call, 1.0) for call in made.calls)),
        )

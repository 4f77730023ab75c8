"""A linear layer and its cross-entropy in chunks of rows, so that neither the logits nor their
gradient ever exist whole.

The captured step has hidden·Wᵀ + b → log-softmax → loss, and backward the gradient of the logits
and what reads it: two products and a sum. The alternative of the loss reads hidden, W and b; while
it has a chunk's logits it makes their gradient, too, and adds up those of hidden, W and b for a
tangent of 1. Backward they are multiplied by the tangent. So nothing is computed twice, and the
operators between need not run at all (Liger Kernel, arXiv:2410.10989, §3.2). Sums over chunks, and
the late tangent, change rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel, with_twin
from memopt.implementations.parts import split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
CHUNKS = 16
"""Of the rows: as many times W's gradient is added to."""
ROUNDED = (torch.float32, torch.float64, torch.bfloat16)
"""What hidden may be of; float16 would lose gradients that wait for a GradScaler's factor."""
MEAN, SUM = 1, 2
VIEWS = frozenset(
    f"aten.{name}"
    for name in ("view.default", "_unsafe_view.default", "reshape.default", "alias.default",
                 "detach.default", "_to_copy.default")
)  # fmt: skip
TURNS = frozenset(("aten.t.default", "aten.transpose.int", "aten.permute.default"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    reduction: int,
    ignore: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """(loss, count of its targets, gradients of hidden, weight [classes, features] and bias)."""
    rows, wide = len(hidden), _wide(hidden.dtype)
    seen = target != ignore
    places = target.where(seen, 0)[:, None]
    count = seen.sum().to(wide)
    total = torch.zeros_like(count)
    shares = seen[:, None] / (count if reduction == MEAN else torch.ones_like(count))
    shares = shares.where(seen[:, None], 0)
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = hidden.new_zeros(weight.shape[::-1], dtype=wide) if wanted[1] else None
    by_bias = hidden.new_zeros((1, weight.shape[1]), dtype=wide) if wanted[2] else None
    for part in split(rows, CHUNKS):
        own = hidden[part]
        logs = (own @ weight if bias is None else torch.addmm(bias, own, weight)).to(wide)
        ATEN._log_softmax.out(logs, 1, False, out=logs)
        picked = logs.gather(1, places[part])
        total -= picked.where(seen[part, None], 0).sum()
        # The gradient of a row's logits is softmax less 1 at its target.
        given = logs.exp_().scatter_(1, places[part], picked.expm1_()).mul_(shares[part])
        if by_bias is not None:
            by_bias += given.sum(0)
        given = given.to(hidden.dtype)
        if by_hidden is not None:
            torch.mm(given, weight.t(), out=by_hidden[part])
        if by_weight is not None and hidden.dtype == wide:
            by_weight.addmm_(given.t(), own)
        elif by_weight is not None:
            by_weight += given.t() @ own
    loss = total / count if reduction == MEAN else total
    made = (by_hidden, by_weight, by_bias)
    return loss, count, *(None if x is None else x.to(hidden.dtype) for x in made)


LOSS = Kernel("cross_entropy.chunked.2", _loss)
SCALED = with_twin("cross_entropy_gradient.chunked", torch.mul, torch.Tensor.mul_)


@dataclass(frozen=True)
class LinearLoss:
    """A loss, the linear layer before it, and what reads its logits' gradient.

    Attributes:
        forward, backward: of the loss.
        softmax, softmax_backward: the log-softmax before it.
        product, hidden, weight, bias: hidden [rows, features], weight [features, classes].
        uses: the two products and the sum that give the gradients of hidden, weight and bias;
            None: not there.
    """

    forward: Node
    backward: Node
    softmax: Node
    softmax_backward: Node
    product: Node
    hidden: Node
    weight: Node
    bias: Node | None
    uses: tuple[Node | None, Node | None, Node | None]


def _behind(node: Any) -> Node | None:
    """The kernel call behind a value, through casts and views."""
    while isinstance(node, Node) and str(node.target) in VIEWS:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _same_rows(left: Node, right: Node) -> bool:
    return bool(value_of(left).shape == value_of(right).shape)


def _product(node: Node | None) -> tuple[Node, Node, Node | None] | None:
    """(hidden, weight, bias) of a linear layer's call."""
    if node is None or node.kwargs:
        return None
    if str(node.target) == "aten.mm.default":
        return node.args[0], node.args[1], None  # type: ignore[return-value]  # nodes
    if str(node.target) != "aten.addmm.default" or value_of(node.args[0]).ndim != 1:
        return None
    return node.args[1], node.args[2], node.args[0]  # type: ignore[return-value]  # nodes


def _uses(
    sites: Sites, gradient: Node, hidden: Node, weight: Node
) -> tuple[Node | None, Node | None, Node | None] | None:
    """What reads the logits' gradient, through views; None: also something else does."""
    around: set[Node] = {gradient}
    turned: set[Node] = set()
    found: dict[int, Node] = {}
    for node in gradient.graph.nodes:
        read = around.union(turned).intersection(node.all_input_nodes)
        if not read:
            continue
        name, first = str(node.target), node.args[0]
        if name in VIEWS or name in TURNS:
            (turned if (first in turned) != (name in TURNS) else around).add(node)
            continue
        if name == "aten.mm.default" and first in around and sites.looks_into(node.args[1], weight):
            place = 0
        elif name == "aten.mm.default" and first in turned and sites.looks_into(
            node.args[1], hidden
        ):  # fmt: skip
            place = 1
        elif name == "aten.sum.dim_IntList" and first in around and node.args[1:] == ([0], True):
            place = 2
        else:
            return None
        if place in found or not value_of(node).is_contiguous():
            return None
        found[place] = node
    return found.get(0), found.get(1), found.get(2)


def linear_losses(sites: Sites) -> Iterator[LinearLoss]:
    """Losses of linear layers (language models' heads): mean or sum, classes not weighted."""
    by_loss = {n.args[0]: n for n in sites.calls("aten._log_softmax_backward_data.default")}
    for backward in sites.calls("aten.nll_loss_backward.default"):
        _, logs, _, weights, reduction, _, count = backward.args
        softmax, forward = _behind(logs), sites.producer(count)
        softmax_backward = by_loss.get(backward)
        if softmax is None or str(softmax.target) != "aten._log_softmax.default":
            continue
        if forward is None or softmax_backward is None or reduction not in (MEAN, SUM):
            continue
        product = _behind(softmax.args[0])
        found = _product(product)
        if product is None or found is None or weights is not None:
            continue
        hidden, weight, bias = found
        if softmax.args[1] not in (1, -1) or not _same_rows(product, softmax):
            continue
        uses = _uses(sites, softmax_backward, hidden, weight)
        if uses is not None:
            yield LinearLoss(
                forward, backward, softmax, softmax_backward, product, hidden, weight, bias, uses
            )


def attach(sites: Sites) -> None:
    """The loss in chunks with its gradients, and the gradients multiplied by the tangent."""
    for site in linear_losses(sites):
        loss = sites.result(site.forward, 0)
        dtype = value_of(site.hidden).dtype
        # The chunks' sums are of the log-softmax's type.
        known = dtype in ROUNDED and value_of(site.softmax).dtype == _wide(dtype)
        if loss is not None and known and isinstance(site.backward.args[6], Node):
            _attach_one(sites, site, loss)


def _attach_one(sites: Sites, site: LinearLoss, loss: Node) -> None:
    g, _, target, _, reduction, ignore, count = site.backward.args
    made = [
        None if use is None else sites.extra(f"{site.forward.name}__{name}", value_of(use))
        for use, name in zip(site.uses, ("hidden", "weight", "bias"), strict=True)
    ]
    sites.add(
        site.forward,
        "chunked",
        LOSS,
        (site.hidden, site.weight, site.bias, target, reduction, ignore,
         tuple(x is not None for x in made)),
        (loss, count, *made),  # type: ignore[arg-type]  # count is a node
        workspace_bytes=_scratch_bytes(site),
        exact=False,
        like=tuple(
            (n, 1.0)
            for n in (site.product, site.softmax, site.forward, site.backward,
                      site.softmax_backward, *site.uses)
            if n is not None
        ),
        moved_bytes=2 * CHUNKS * 4 * value_of(site.weight).numel(),
    )  # fmt: skip
    for use, extra in zip(site.uses, made, strict=True):
        if use is not None:
            sites.add(use, "chunked", SCALED, (extra, g), exact=False)


def _scratch_bytes(site: LinearLoss) -> int:
    """A chunk's logits, and where they are of a narrower type both types' and W's gradient."""
    value, rows = value_of(site.product), value_of(site.hidden).shape[0]
    width = int(_wide(value.dtype).itemsize)
    narrow = int(value.dtype.itemsize) if value.dtype.itemsize < width else 0
    chunk = -(-int(rows) // CHUNKS) * int(value.shape[-1])
    sums = int(value_of(site.weight).numel()) * width if narrow else 0
    return chunk * (width + narrow) + 2 * sums + 4 * 8 * int(rows)

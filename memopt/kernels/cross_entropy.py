"""A linear layer and its cross-entropy in chunks of rows, so that neither the logits nor their
gradient ever exist whole.

The captured step has hidden·Wᵀ + b → log-softmax → loss, and in the backward the gradient of the
logits and its readers: two products and a sum. The alternative of the loss reads hidden, W and b.
While it has a chunk's logits it computes their gradient, too, and adds up those of hidden, W and b
for a tangent of 1. The backward multiplies them by the tangent. So nothing is computed twice, and
the operators between need not run (Liger Kernel, arXiv:2410.10989, §3.2). Sums over chunks, and
the late tangent, change rounding.

Another alternative computes the gradient of any cross-entropy's logits in one call, over the
log-softmax. ATen writes the gradient of the log-softmax (one nonzero element per row) as a tensor
as large as the logits, and the gradient of the logits beside it. Here the former exists for an
eighth of the rows at a time. The same kernels run on the same rows: exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.kernel import Kernel, split, with_twin, writing
from memopt.kernels.site import Sites, contiguous, part_bytes, value_of
from memopt.torch_private.operators import aten as ATEN

CHUNKS = 16
"""Number of row chunks; W's gradient is added to as many times."""
ROUNDED = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of hidden; float16 would lose gradients that wait for a GradScaler's factor."""
MEAN, SUM = 1, 2
LOG_SOFTMAX = "aten._log_softmax.default"
Uses = tuple[Node | None, Node | None, Node | None]
"""The two products and the sum that give the gradients of hidden, weight and bias; None: absent."""
VIEWS = frozenset(
    f"aten.{name}"
    for name in ("view.default", "_unsafe_view.default", "reshape.default", "alias.default",
                 "detach.default", "_to_copy.default")
)  # fmt: skip
TURNS = frozenset(("aten.t.default", "aten.transpose.int", "aten.permute.default"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Return loss, count of its targets, gradients of hidden, weight [classes, features], bias."""
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


def _rows(result: Tensor, logs: Tensor, g: Tensor, target: Tensor, *given: Any) -> Tensor:
    for part in split(len(logs)):
        picked = ATEN.nll_loss_backward(g, logs[part], target[part], *given)
        ATEN._log_softmax_backward_data.out(picked, logs[part], 1, logs.dtype, out=result[part])
    return result


LOSS = Kernel("cross_entropy.chunked.2", _loss)
SCALED = with_twin("cross_entropy_gradient.chunked", torch.mul, Tensor.mul_)
ROWS = writing("cross_entropy_backward.rows", _rows)


def _is(node: Any, *targets: str) -> bool:
    return isinstance(node, Node) and str(node.target) in targets


def _behind(node: Any, *targets: str) -> Node | None:
    """Return the kernel call behind a value, through casts and views, if it is one of these."""
    while _is(node, *VIEWS):
        node = node.args[0]
    return node if _is(node, *targets) else None


def _uses(sites: Sites, gradient: Node, hidden: Node, weight: Node) -> Uses | None:
    """Return the readers of the logits' gradient, through views; None: there are others."""
    around: set[Node] = {gradient}
    turned: set[Node] = set()
    found: dict[int, Node] = {}
    for node in gradient.graph.nodes:
        if not around.union(turned).intersection(node.all_input_nodes):
            continue
        first, *rest = node.args
        if _is(node, *VIEWS, *TURNS):
            (turned if (first in turned) != _is(node, *TURNS) else around).add(node)
            continue
        product = _is(node, "aten.mm.default")
        if product and first in around and sites.looks_into(rest[0], weight):
            place = 0
        elif product and first in turned and sites.looks_into(rest[0], hidden):
            place = 1
        elif _is(node, "aten.sum.dim_IntList") and first in around and rest == [[0], True]:
            place = 2
        else:
            return None
        if place in found or not contiguous(node):
            return None
        found[place] = node
    return found.get(0), found.get(1), found.get(2)


def attach(sites: Sites) -> None:
    """Attach the chunked loss to cross-entropies of a linear layer (a language model's head) that
    are means or sums without class weights. It computes the gradients, too; the operators of the
    backward get alternatives that multiply these by the tangent."""
    by_loss = {n.args[0]: n for n in sites.calls("aten._log_softmax_backward_data.default")}
    for forward, backward in sites.pairs("aten.nll_loss_backward.default", 6):
        _, logs, _, weights, reduction, _, _ = backward.args
        softmax, softmax_backward = _behind(logs, LOG_SOFTMAX), by_loss.get(backward)
        if softmax is None or softmax_backward is None or softmax.args[1] not in (1, -1):
            continue
        product = _behind(softmax.args[0], "aten.mm.default", "aten.addmm.default")
        if product is None or weights is not None or reduction not in (MEAN, SUM):
            continue
        operands: Any = (None, *product.args)[-3:]
        bias, hidden, weight = operands
        if product.kwargs or (bias is not None and value_of(bias).ndim != 1):
            continue
        # The chunks' sums have the log-softmax's dtype.
        dtype, of_logs = value_of(hidden).dtype, value_of(softmax)
        if dtype not in ROUNDED or of_logs.dtype != _wide(dtype):
            continue
        uses = _uses(sites, softmax_backward, hidden, weight)
        loss, same_rows = sites.result(forward, 0), value_of(product).shape == of_logs.shape
        if not same_rows or uses is None or loss is None:
            continue
        g, _, target, _, _, ignore, count = backward.args
        made = [
            None if use is None else sites.extra(f"{forward.name}__{name}", value_of(use))
            for use, name in zip(uses, ("hidden", "weight", "bias"), strict=True)
        ]
        wanted = tuple(x is not None for x in made)
        like = (product, softmax, forward, backward, softmax_backward, *uses)
        sites.add(
            forward,
            "chunked",
            LOSS,
            (hidden, weight, bias, target, reduction, ignore, wanted),
            (loss, count, *made),  # type: ignore[arg-type]  # count is a node
            workspace_bytes=_scratch_bytes(value_of(hidden), value_of(weight)),
            exact=False,
            like=tuple((call, 1.0) for call in like if call is not None),
            moved_bytes=2 * CHUNKS * 4 * value_of(weight).numel(),
        )
        for use, extra in zip(uses, made, strict=True):
            if use is not None:
                sites.add(use, "chunked", SCALED, (extra, g), exact=False)


def _scratch_bytes(hidden: Tensor, weight: Tensor) -> int:
    """Return the bytes of a chunk's logits; for a narrower dtype in both, with W's gradient."""
    rows, width = len(hidden), _wide(hidden.dtype).itemsize
    narrow = hidden.dtype.itemsize if hidden.dtype.itemsize < width else 0
    chunk = -(-rows // CHUNKS) * weight.shape[1]
    sums = weight.numel() * width if narrow else 0
    return chunk * (width + narrow) + 2 * sums + 4 * 8 * rows


def attach_rows(sites: Sites) -> None:
    """Attach alternatives that compute a cross-entropy's gradient in chunks of rows: of means or
    sums, with or without class weights, where no cast lies between softmax and loss."""
    for softmax_backward in sites.calls("aten._log_softmax_backward_data.default"):
        given: Any = softmax_backward.args
        backward, logs, dim, dtype = given
        if not _is(backward, "aten.nll_loss_backward.default"):
            continue
        g, own, target, weights, reduction, ignore, count = backward.args
        value = value_of(logs)
        same = sites.looks_into(own, logs) and value_of(own).shape == value.shape
        if not same or dim not in (1, -1) or value.ndim != 2 or dtype != value.dtype:
            continue
        if reduction in (MEAN, SUM) and contiguous(logs):
            sites.add(
                softmax_backward,
                "rows",
                ROWS,
                (logs, g, target, weights, reduction, ignore, count),
                workspace_bytes=part_bytes(logs),
                like=((backward, 1.0), (softmax_backward, 1.0)),
            )

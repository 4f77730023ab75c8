"""A linear layer and its cross-entropy in chunks of rows, so that neither the logits nor their
gradient ever exist whole.

The captured step has hidden·Wᵀ → log-softmax → loss, and backward the gradient of the logits and
two products. The alternative of the loss reads hidden and W; those of the two products read
hidden, W and the loss's tangent, and compute their rows' logits again. The operators between need
not run at all. Sums over chunks change the rounding of the loss and of W's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
CHUNKS = 8
"""Of the rows: scratch memory is two tensors of an eighth of the logits."""


def _parts(rows: int) -> Iterator[slice]:
    step = max(1, -(-rows // CHUNKS))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    return ATEN._log_softmax((hidden @ weight).float(), 1, False)


def _loss(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: int, ignore: int
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    count = torch.zeros_like(total)
    for part in _parts(len(hidden)):
        # Reduction 2 is the sum.
        one, seen = ATEN.nll_loss_forward(
            _log_softmax(hidden[part], weight), target[part], None, 2, ignore
        )
        total += one
        count += seen
    return (total / count if reduction == 1 else total), count


def _gradient(
    g: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore: int,
    count: torch.Tensor,
) -> torch.Tensor:
    """Of the rows' logits."""
    logs = _log_softmax(hidden, weight)
    picked = ATEN.nll_loss_backward(g, logs, target, None, reduction, ignore, count)
    found: torch.Tensor = ATEN._log_softmax_backward_data(picked, logs, 1, torch.float32)
    return found.to(hidden.dtype)


def _hidden_gradient(
    g: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *more: Any
) -> Any:
    target, *rest = more
    result = torch.empty_like(hidden)
    for part in _parts(len(hidden)):
        given = _gradient(g, hidden[part], weight, target[part], *rest)
        torch.mm(given, weight.t(), out=result[part])
    return result


def _weight_gradient(
    g: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *more: Any
) -> Any:
    """[classes, features], as `logits.t() @ hidden` gives it."""
    target, *rest = more
    result = hidden.new_zeros(weight.shape[1], weight.shape[0])
    for part in _parts(len(hidden)):
        given = _gradient(g, hidden[part], weight, target[part], *rest)
        result.addmm_(given.t(), hidden[part])
    return result


LOSS = Kernel("cross_entropy.chunked", _loss)
HIDDEN = Kernel("cross_entropy_hidden_gradient.chunked", _hidden_gradient)
WEIGHT = Kernel("cross_entropy_weight_gradient.chunked", _weight_gradient)


def _behind(sites: Sites, node: Any) -> Node | None:
    """The kernel call behind a value, through casts and views that keep the rows whole."""
    for _ in range(4):
        if not isinstance(node, Node):
            return None
        if str(node.target) in ("aten.mm.default", "aten._log_softmax.default"):
            return node
        if str(node.target) not in (
            "aten.view.default",
            "aten._unsafe_view.default",
            "aten.reshape.default",
            "aten.alias.default",
            "aten.detach.default",
            "aten._to_copy.default",
        ):
            return None
        node = node.args[0]
    return None


def _same_rows(left: Node, right: Node) -> bool:
    return bool(value_of(left).shape == value_of(right).shape)


def _uses(sites: Sites, gradient: Node) -> Iterator[tuple[Node, int]]:
    """The two products that read the logits' gradient, through views: (call, argument)."""
    around = {gradient}
    for node in gradient.graph.nodes:
        if any(n in around for n in node.all_input_nodes):
            if str(node.target) == "aten.mm.default":
                yield node, next(i for i, n in enumerate(node.args) if n in around)
            elif str(node.target) in (
                "aten.view.default",
                "aten._unsafe_view.default",
                "aten.reshape.default",
                "aten.t.default",
                "aten.transpose.int",
                "aten._to_copy.default",
            ):
                around.add(node)


def attach(sites: Sites) -> None:
    """Losses of linear layers without bias (language models' heads), mean or sum, unweighted."""
    for backward in sites.calls("aten.nll_loss_backward.default"):
        _, logs, _, weights, reduction, _, count = backward.args
        softmax = _behind(sites, logs)
        forward = sites.producer(count)
        if softmax is None or forward is None or weights is not None or reduction not in (1, 2):
            continue
        product = _behind(sites, softmax.args[0])
        if value_of(softmax).dtype != torch.float32:
            # The chunks' logits and sums are float32.
            continue
        if product is None or softmax.args[1] not in (1, -1) or not _same_rows(product, softmax):
            continue
        _attach_one(sites, backward, forward, product, softmax)


def _attach_one(sites: Sites, backward: Node, forward: Node, product: Node, softmax: Node) -> None:
    g, _, target, _, reduction, ignore, count = backward.args
    hidden, weight = product.args
    loss = sites.result(forward, 0)
    if loss is None or not isinstance(count, Node):
        return
    chunk_bytes = -(-value_of(product).numel() // CHUNKS) * 4
    given = (hidden, weight, target, reduction, ignore)
    scratch = 3 * chunk_bytes
    softmax_backward = next(
        (
            n
            for n in sites.calls("aten._log_softmax_backward_data.default")
            if n.args[0] is backward
        ),
        None,
    )
    if softmax_backward is None:
        return
    products = list(_uses(sites, softmax_backward))
    shape = value_of(hidden).shape
    if len(products) != 2 or any(not value_of(n).is_contiguous() for n, _ in products):
        return
    sites.add(
        forward,
        "chunked",
        LOSS,
        given,
        (loss, count),
        workspace_bytes=scratch,
        exact=False,
        like=tuple((n, 1.0) for n in (product, softmax, forward)),
    )
    for node, _ in products:
        kernel = HIDDEN if value_of(node).shape == shape else WEIGHT
        sites.add(
            node,
            "chunked",
            kernel,
            (g, *given, count),
            workspace_bytes=scratch,
            exact=False,
            like=tuple((n, 1.0) for n in (product, softmax, backward, softmax_backward, node)),
        )

"""What an operator does along the dimensions of its operands and results.

Every dimension has a label. A label that stands at several places goes through the operator
element by element; one that is missing in a result was summed over. Dimensions of size 1 have no
label. Of operators that are not listed nothing is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.fx import Node

from memopt.step.nodes import is_random, overload_of
from memopt.torch_private.operators import OpOverload

Labels = tuple[int | None, ...]
"""One of each dimension; None: its size is 1."""


@dataclass
class Dims:
    """The labels of a call.

    Attributes:
        ins: (operand, its labels), tensors only.
        outs: of each result; None: no tensor.
        mixed: labels along which elements depend on one another, or are selected.
        merges: (label, (two labels of which it is the product)).
        sums: whether a label that a result lacks was summed over.
    """

    ins: list[tuple[Node, Labels]] = field(default_factory=list)
    outs: list[Labels | None] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)
    merges: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    sums: bool = False
    numbers: Any = field(default_factory=count)

    def new(self, shape: Iterable[int]) -> Labels:
        """Return new labels of a shape."""
        return tuple(next(self.numbers) if size != 1 else None for size in shape)

    def mixed_new(self, shape: Iterable[int]) -> Labels:
        """Return new labels of a shape, all of them mixed."""
        made = self.new(shape)
        self.mixed |= {one for one in made if one is not None}
        return made

    def aligned(self, node: Node, labels: Labels, shape: Sequence[int]) -> None:
        """Add an operand that is broadcast to a shape with these labels."""
        own = shape_of(node)
        given = labels[len(labels) - len(own) :] if own else ()
        sizes = shape[len(shape) - len(own) :] if own else ()
        found = (
            one if size == whole != 1 else None
            for one, size, whole in zip(given, own, sizes, strict=True)
        )
        self.ins.append((node, tuple(found)))


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def is_tensor(node: Any) -> bool:
    """Return whether an argument is a node of a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def dims_of(node: Node) -> Dims | None:
    """Return the labels of a call; None: nothing is known about the operator."""
    if node.target is operator.getitem or is_random(node):
        return None
    target = overload_of(node)
    rule = _RULES.get(str(target).removeprefix("aten."))
    if rule is None and isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        rule = _pointwise
    return rule(node) if rule is not None else None


def _pointwise(node: Node) -> Dims | None:
    if not is_tensor(node):
        return None
    made, shape = Dims(), shape_of(node)
    labels = made.new(shape)
    for one in node.all_input_nodes:
        if not is_tensor(one):
            return None
        made.aligned(one, labels, shape)
    made.outs = [labels]
    return made


def _viewed(node: Node) -> Dims:
    made, source = Dims(), _first(node)
    old, new = shape_of(source), shape_of(node)
    given: list[Any] = list(made.new(old))
    found: list[Any] = list(made.new(new))
    left = [i for i, size in enumerate(old) if size != 1]
    right = [i for i, size in enumerate(new) if size != 1]
    while left and right:
        one, other = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(old[i] for i in one)) != (b := math.prod(new[i] for i in other)):
            if a < b:
                one.append(left.pop(0))
            else:
                other.append(right.pop(0))
        if len(one) == len(other) == 1:
            found[other[0]] = given[one[0]]
        elif (len(one), len(other)) == (2, 1):
            made.merges.append((found[other[0]], (given[one[0]], given[one[1]])))
        elif (len(one), len(other)) == (1, 2):
            made.merges.append((given[one[0]], (found[other[0]], found[other[1]])))
        else:
            made.mixed |= {given[i] for i in one} | {found[i] for i in other}
    made.ins, made.outs = [(source, tuple(given))], [tuple(found)]
    return made


def _first(node: Node) -> Any:
    return node.args[0]


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _moved(order: Callable[[Node, int], Sequence[int | None]]) -> Callable[[Node], Dims]:
    """Return the rule of a view whose dimensions are those of its operand, in another order; None
    stands for a new one."""

    def rule(node: Node) -> Dims:
        made, source = Dims(), _first(node)
        labels = made.new(shape_of(source))
        places = order(node, len(labels))
        found = tuple(None if place is None else labels[place] for place in places)
        made.ins, made.outs = [(source, labels)], [found]
        return made

    return rule


def _transposed(node: Node, rank: int) -> list[int | None]:
    places: list[int | None] = list(range(rank))
    one, other = (_args(node)[1], _args(node)[2]) if len(node.args) > 2 else (0, rank - 1)
    if rank:
        places[one], places[other] = places[other], places[one]
    return places


def _unsqueezed(node: Node, rank: int) -> list[int | None]:
    places: list[int | None] = list(range(rank))
    dim = int(_args(node)[1])
    places.insert(dim + rank + 1 if dim < 0 else dim, None)
    return places


def _squeezed(node: Node, rank: int) -> list[int | None]:
    shape = shape_of(_first(node))
    asked = _args(node)[1] if len(node.args) > 1 else list(range(rank))
    gone = {d % rank for d in ([asked] if isinstance(asked, int) else asked)}
    return [i for i in range(rank) if not (i in gone and shape[i] == 1)]


def _expanded(node: Node) -> Dims:
    made, shape = Dims(), shape_of(node)
    labels = made.new(shape)
    made.aligned(_first(node), labels, shape)
    made.outs = [labels]
    return made


def _part(node: Node) -> Dims:
    """Return the dimensions of a call that selects from, pads or joins along one dimension; all
    others pass through."""
    made, shape = Dims(), shape_of(node)
    name = str(overload_of(node))
    dim = _args(node)[2 if "backward" in name else 1] if len(node.args) > 1 else 0
    labels = list(made.new(shape))
    place = int(dim) % len(shape)
    given: Any = _args(node)[0]
    listed = given if isinstance(given, (list, tuple)) else [given]
    if len(listed) == 1 and shape_of(listed[0]) == shape:
        made.ins, made.outs = [(listed[0], tuple(labels))], [tuple(labels)]
        return made
    labels[place] = None
    for one in listed:
        own = list(labels)
        own[place] = made.mixed_new([shape_of(one)[place]])[0]
        made.ins.append((one, tuple(own)))
    labels[place] = made.mixed_new([shape[place]])[0]
    made.outs = [tuple(labels)]
    return made


def _split(node: Node) -> Dims:
    """The parts of one dimension."""
    made, source = Dims(), _first(node)
    values, shape = node.meta["val"], shape_of(source)
    dim: Any = _args(node)[2] if len(node.args) > 2 else 0
    place, labels = int(dim) % len(shape), list(made.new(shape))
    labels[place] = None
    made.outs = [
        tuple(made.mixed_new([n])[0] if i == place else labels[i] for i, n in enumerate(one.shape))
        for one in values
    ]
    labels[place] = made.mixed_new([shape[place]])[0]
    made.ins = [(source, tuple(labels))]
    return made


def _selected(node: Node) -> Dims:
    """One dimension is missing in the result (select), or in the operand (its backward)."""
    backward = "backward" in str(overload_of(node))
    made, source = Dims(), _first(node)
    wide = shape_of(node if backward else source)
    place = int(_args(node)[2 if backward else 1]) % len(wide)
    labels = list(made.new(wide))
    less = tuple(labels[:place] + labels[place + 1 :])
    labels[place] = made.mixed_new([wide[place]])[0]
    made.ins = [(source, less if backward else tuple(labels))]
    made.outs = [tuple(labels) if backward else less]
    return made


def _product(node: Node) -> Dims | None:
    *bias, left, right = _args(node)
    if node.kwargs or not (is_tensor(left) and is_tensor(right)):
        return None
    made = Dims(sums=not bias)
    *batch, rows, inner = shape_of(left)
    batch_labels = made.new(batch)
    row, inside, column = made.new((rows, inner, shape_of(right)[-1]))
    made.ins = [(left, (*batch_labels, row, inside)), (right, (*batch_labels, inside, column))]
    labels = (*batch_labels, row, column)
    made.outs = [labels]
    for one in bias:
        made.aligned(one, labels, shape_of(node))
    return made


def _reduced(sums: bool) -> Callable[[Node], Dims | None]:
    """Return the rule of reductions, which are sums over dimensions or mix them."""

    def rule(node: Node) -> Dims | None:
        source = _first(node)
        if not is_tensor(node):
            return None
        shape, given = shape_of(source), _args(node)[1:]
        asked = given[0] if given and given[0] not in (None, []) else range(len(shape))
        listed = [asked] if isinstance(asked, int) else asked
        gone = {int(d) % len(shape) for d in listed}
        kept = len(shape_of(node)) == len(shape)
        made = Dims(sums=sums)
        labels = made.new(shape)
        if not sums:
            made.mixed |= {one for i, one in enumerate(labels) if i in gone and one is not None}
        made.ins = [(source, labels)]
        found = [None if i in gone else one for i, one in enumerate(labels)]
        made.outs = [tuple(o for i, o in enumerate(found) if kept or i not in gone)]
        return made

    return rule


def _along(place: int) -> Callable[[Node], Dims]:
    """Return the rule of operators whose operands and result have the same shape, and that mix one
    dimension: the argument at `place`."""

    def rule(node: Node) -> Dims:
        made, shape = Dims(), shape_of(node)
        labels = made.new(shape)
        dim = labels[int(_args(node)[place]) % len(shape)]
        made.mixed |= set() if dim is None else {dim}
        made.ins = [(one, labels) for one in node.all_input_nodes]
        made.outs = [labels]
        return made

    return rule


def _normed(backward: bool) -> Callable[[Node], Dims]:
    """Return the rule of norms over the last dimensions: layer norms and RMS norms."""

    def rule(node: Node) -> Dims:
        source = _args(node)[1 if backward else 0]
        shape = shape_of(source)
        inner: Any = _args(node)[2 if backward else 1]
        made, rank = Dims(sums=backward), len(shape) - len(inner)
        outer, inside = made.new(shape[:rank]), made.mixed_new(shape[rank:])
        whole = (*outer, *inside)
        by_rank = {len(shape): whole, len(inner): inside}
        for one in node.all_input_nodes:
            own = shape_of(one)
            if len(own) == len(shape) and own != shape:
                made.ins.append((one, (*outer, *(None for _ in inside))))
            else:
                made.ins.append((one, by_rank[len(own)]))
        for value in node.meta["val"]:
            if value is None:
                made.outs.append(None)
            elif tuple(value.shape) == shape:
                made.outs.append(whole)
            elif backward:
                made.outs.append(inside)
            else:
                made.outs.append((*outer, *(None for _ in inside)))
        return made

    return rule


def _gathered(node: Node) -> Dims | None:
    source, dim, index = _args(node)[:3]
    made, shape, own = Dims(), shape_of(node), shape_of(source)
    place = int(dim) % len(shape)
    if any(a != b for i, (a, b) in enumerate(zip(own, shape, strict=True)) if i != place):
        return None
    labels, given = list(made.new(shape)), list(made.new(own))
    given = [one if i == place else labels[i] for i, one in enumerate(given)]
    made.mixed |= {one for one in (labels[place], given[place]) if one is not None}
    made.ins, made.outs = [(source, tuple(given)), (index, tuple(labels))], [tuple(labels)]
    return made


def _looked_up(node: Node) -> Dims:
    table, index = _args(node)[:2]
    made, shape = Dims(), shape_of(node)
    labels = (*made.new(shape[:-1]), *made.mixed_new(shape[-1:]))
    made.ins = [(table, made.mixed_new(shape_of(table))), (index, labels[:-1])]
    made.outs = [labels]
    return made


def _lost(node: Node) -> Dims:
    """Return the dimensions of the gradient of a negative log-likelihood in the log-probabilities
    [rows, classes]."""
    _, logs, target, weights, _, _, total = _args(node)
    made = Dims()
    rows, classes = made.new(shape_of(logs))
    made.mixed |= set() if classes is None else {classes}
    made.ins = [(logs, (rows, classes)), (target, (rows,))]
    given = (_args(node)[0], weights, total)
    made.ins += [(one, made.mixed_new(shape_of(one))) for one in given if is_tensor(one)]
    made.outs = [(rows, classes)]
    return made


_SAME = (
    "_to_copy.default clone.default detach.default alias.default where.self where.ScalarSelf "
    "where.ScalarOther where.Scalar hardtanh_backward.default hardswish.default "
    "hardswish_backward.default elu_backward.default softplus_backward.default "
    "native_dropout_backward.default silu_backward.default gelu_backward.default "
    "threshold_backward.default sigmoid_backward.default tanh_backward.default "
    "leaky_relu_backward.default"
)
_RULES: dict[str, Callable[[Node], Dims | None]] = {
    **dict.fromkeys(_SAME.split(), _pointwise),
    **dict.fromkeys(("view.default", "_unsafe_view.default", "reshape.default"), _viewed),
    "t.default": _moved(_transposed),
    "transpose.int": _moved(_transposed),
    "permute.default": _moved(lambda node, rank: [d % rank for d in _args(node)[1]]),
    "unsqueeze.default": _moved(_unsqueezed),
    "squeeze.dim": _moved(_squeezed),
    "squeeze.dims": _moved(_squeezed),
    "squeeze.default": _moved(_squeezed),
    "expand.default": _expanded,
    **dict.fromkeys(("cat.default", "slice.Tensor", "slice_backward.default"), _part),
    **dict.fromkeys(("split.Tensor", "split_with_sizes.default"), _split),
    **dict.fromkeys(("select.int", "select_backward.default"), _selected),
    **dict.fromkeys(("mm.default", "addmm.default"), _product),
    "sum.dim_IntList": _reduced(True),
    "sum.default": _reduced(True),
    **dict.fromkeys(("mean.dim", "amax.default", "amin.default"), _reduced(False)),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default"), _along(1)),
    "_softmax_backward_data.default": _along(2),
    "_log_softmax_backward_data.default": _along(2),
    **dict.fromkeys(("native_layer_norm.default", "_fused_rms_norm.default"), _normed(False)),
    "native_layer_norm_backward.default": _normed(True),
    "_fused_rms_norm_backward.default": _normed(True),
    "gather.default": _gathered,
    "embedding.default": _looked_up,
    "nll_loss_backward.default": _lost,
}
"""Operator → its rule; pointwise operators have theirs by their tag."""
SIZED = frozenset(
    f"aten.{name}"
    for name in ("view.default", "_unsafe_view.default", "reshape.default", "expand.default",
                 "slice_backward.default", "select_backward.default")
)  # fmt: skip
"""Operators whose second argument is the shape of their result."""

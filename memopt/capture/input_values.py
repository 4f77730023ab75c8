"""Computes values that a forward reads in Python, and that its inputs alone decide.

A branch on `mask.all()` cannot be in a graph, nor can `int(lengths.max())`. Where no parameter,
buffer or random number takes part, the value can be computed before the step: it is part of what a
plan is made for, as the inputs' shapes are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from memopt.step.input_values import UNREADABLE, InputValue
from memopt.step.nodes import ancestors
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.modes import TorchDispatchMode
from memopt.torch_private.numbers_of_tensors import updated_by
from memopt.torch_private.tensors import storage_key, version_of

_ARGUMENT = re.compile(r"l_flat_args_(\d+)_")
"""Dynamo's names of a call's flat arguments."""
_SHAPED = {"expand_as": "expand", "reshape_as": "reshape", "view_as": "view"}
"""Methods that read another tensor's shape alone → methods that take the shape."""
_AUTOCAST = "_enter_autocast"


def computed_from_inputs(node: Node, count: int, item: bool = False) -> GraphModule | None:
    """Return what computes a node of Dynamo's graph from a call's flat arguments; None: it depends
    on more, or on arguments that the forward changes in place.

    Args:
        node: the node.
        count: how many flat arguments there are.
        item: whether to compute the one number in the node's tensor.
    """
    sources = _with_updates(node)
    if sources is None or any(_depends_on_more(one) for one in sources):
        return None
    if any(_is_floating(one) for one in sources) and _enters_autocast(node):
        return None
    made = Graph()
    arguments = [made.placeholder(f"argument_{i}") for i in range(count)]
    copies: dict[Node, Node] = {}
    for one in node.graph.nodes:
        if one not in sources:
            continue
        found = _ARGUMENT.fullmatch(one.name) if one.op == "placeholder" else None
        copies[one] = arguments[int(found[1])] if found else _copied(one, made, copies)
    computed = copies[node]
    made.output(made.call_method("item", (computed,)) if item else computed)
    return GraphModule({}, made)


def _copied(node: Node, made: Graph, copies: dict[Node, Node]) -> Node:
    """Copy a node into another graph, which has copies of what the node reads."""
    if node.target not in _SHAPED or len(_read_by(node)) > 1:
        return made.node_copy(node, copies.__getitem__)
    first, like = node.args[:2]
    assert isinstance(first, Node)
    assert isinstance(like, Node)
    shape = tuple(like.meta["example_value"].shape)
    return made.call_method(_SHAPED[str(node.target)], (copies[first], shape))


def is_drawn(node: Node) -> bool:
    """Return whether a value is computed from no argument, parameter or buffer: as a rule it is
    random, and differs from step to step."""
    return all(one.op in ("call_function", "call_method") for one in ancestors(node, _read_by))


def is_state(node: Node) -> bool:
    """Return whether a value is computed from parameters and buffers alone, which the graph has not
    changed so far."""
    made = ancestors(node, _read_by)
    kinds = {one.op for one in made}
    return "get_attr" in kinds and "placeholder" not in kinds and not any(map(_updates, made))


def number_of_state(node: Node, state: Mapping[str, Any]) -> Any:
    """Compute the one number of a node that depends on parameters and buffers alone (`is_state`);
    None: it is not known.

    Args:
        node: the node.
        state: target in the graph → parameter or buffer.
    """
    made, sources = Graph(), ancestors(node, _read_by)
    copies: dict[Node, Node] = {}
    held: list[Any] = []
    for one in node.graph.nodes:
        if one.op == "get_attr" and one in sources:
            copies[one] = made.placeholder(one.name)
            held.append(state.get(one.target))
        elif one in sources:
            copies[one] = _copied(one, made, copies)
    made.output(copies[node])
    return value_now(GraphModule({}, made), False, held)[0]


def value_now(compute: GraphModule, truth: bool, leaves: Sequence[Any]) -> tuple[Any, bool]:
    """Compute a value from the tensors that it is computed from, or the flat arguments.

    Returns:
        The value (None: these have none), and whether random operators take part.
    """
    read = [
        leaf
        for place, leaf in zip(compute.graph.find_nodes(op="placeholder"), leaves, strict=True)
        if place.users
    ]
    fake = any(isinstance(leaf, FakeTensor) or getattr(leaf, "is_meta", False) for leaf in read)
    try:
        with _Draws():  # type: ignore[no-untyped-call]
            found = InputValue(compute, truth, None, "").read(leaves)
    except _DrawnError:
        return None, True
    except UNREADABLE:  # the forward raises one, too
        return None, False
    return None if fake else found, False


class _DrawnError(Exception):
    """A random operator is called."""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random operators."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise _DrawnError
        return function(*args, **kwargs or {})


def _read_by(node: Node) -> list[Node]:
    """Return the nodes whose values a node reads."""
    if node.op != "call_method" or node.target not in _SHAPED or len(node.args) < 2:
        return node.all_input_nodes
    first, like = node.args[:2]
    assert isinstance(like, Node)
    whole = all(isinstance(size, int) for size in like.meta["example_value"].shape)
    return [first] if whole and isinstance(first, Node) else node.all_input_nodes


def _with_updates(node: Node) -> set[Node] | None:
    """Return the ancestors of a node, and all that changes them in place; None: not all of that is
    known, or it changes what the graph is given."""
    found = ancestors(node, _read_by)
    if not any(map(_updates, found)):
        return found
    updates: dict[int | None, set[Node]] = {}
    given: set[int | None] = set()
    for one in node.graph.nodes:
        if one.op not in ("call_function", "call_method"):
            given.add(_storage(one))
        elif (updated := updated_by(one)) is not None:
            updates.setdefault(_storage(updated), set()).add(one)
    while True:
        changed = {_storage(one): _updates(one) for one in found if _updates(one)}
        for storage, number in changed.items():
            if storage in given or len(updates.get(storage, ())) != number:
                return None
        more = {one for storage in changed for one in updates[storage]} - found
        if not more:
            return found
        found = found.union(*(ancestors(one, _read_by) for one in more))


def _storage(node: Node) -> int | None:
    made = node.meta.get("example_value")
    return int(storage_key(made.untyped_storage())) if isinstance(made, torch.Tensor) else None


def _updates(node: Node) -> int:
    """Return how often the tensor that a node makes was changed in place."""
    made = node.meta.get("example_value")
    return version_of(made) if isinstance(made, torch.Tensor) else 0


def _depends_on_more(node: Node) -> bool:
    if node.op == "placeholder":
        return _ARGUMENT.fullmatch(node.name) is None
    return node.op not in ("call_function", "call_method")


def _is_floating(node: Node) -> bool:
    made = node.meta.get("example_value")
    return isinstance(made, torch.Tensor) and made.is_floating_point()


def _enters_autocast(node: Node) -> bool:
    return any(getattr(one.target, "__name__", "") == _AUTOCAST for one in node.graph.nodes)

"""Numbers of tensors (`item()`) in Dynamo's graphs, and what is computed from them."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from memopt.torch_private.access import known, patched, private
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_OPEN = "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols"
_MADE = "unbacked_bindings"
"""What Dynamo notes of an operator that makes symbols of values: which."""
_IN_RANGE = "torch.ops.aten._assert_scalar.default"

_NUMBER = "torch._dynamo.variables.SymNodeVariable"
_CREATE = f"{_NUMBER}.create"

_WRAP = "torch._dynamo.variables.builder.VariableBuilder._wrap"
_LATER = "torch._dynamo.variables.LazyConstantVariable.create"
_SOURCE = "torch._dynamo.source.FloatTensorSource"
_KINDS = {int: torch.int64, float: torch.float64}
_LARGEST = 2.0**53
KEPT = "number"
"""Key under which a node's `meta` has the number in the tensor that it stands for."""

_IN_PLACE = {
    getattr(operator, name)
    for name in dir(operator)
    if name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
} - {operator.index, operator.inv, operator.invert}
"""Python's operators that change their first operand in place."""

_SIZED = ("arange", "empty", "eye", "ones", "rand", "randn", "zeros")
"""Functions of torch's that read a number out of each tensor that they are given."""


def items_of(node: Node) -> tuple[Node, ...]:
    """Return the `item()` nodes that a number is computed from; none if it is of anything else,
    too."""
    found, waiting, seen = list[Node](), [node], {node}
    while waiting:
        one = waiting.pop()
        if one.op == "call_method" and one.target == "item":
            found.append(one)
        elif one.op != "call_function" or not one.all_input_nodes:
            return ()
        else:
            new = [other for other in one.all_input_nodes if other not in seen]
            seen.update(new)
            waiting += new
    return tuple(found)


@contextlib.contextmanager
def comparisons_open() -> Iterator[list[Node]]:
    """Trace inside with comparisons of numbers that are not whole as open ones, and collect them:
    Dynamo knows neither NaN nor infinity, and decides `m != m` or `m == math.inf` by itself."""
    number, create, thread = private(_NUMBER), private(_CREATE), threading.get_ident()
    found = list[Node]()

    def created(translator: Any, proxy: Any, *args: Any, **options: Any) -> Any:
        made, node = create(translator, proxy, *args, **options), proxy.node
        value = node.meta.get("example_value")
        compared = isinstance(value, (bool, torch.SymBool)) and threading.get_ident() == thread
        if not compared or not any(map(_is_real, items_of(node))):
            return made
        found.append(node)
        return number(proxy, value)

    with ONE_TRACE_AT_A_TIME, patched(_CREATE, staticmethod(created)):
        yield found


def _is_real(item: Node) -> bool:
    return isinstance(item.meta.get("example_value"), torch.SymFloat)


def computed_by(node: Node, items: Sequence[Node]) -> GraphModule | None:
    """Return what computes a node from the numbers of these nodes; None: it is the only one."""
    if tuple(items) == (node,):
        return None
    made = Graph()
    known = {item: made.placeholder(f"number_{i}") for i, item in enumerate(items)}

    def copied(one: Node) -> Node:
        if one not in known:
            known[one] = made.node_copy(one, copied)
        return known[one]

    made.output(copied(node))
    return GraphModule({}, made)


def has_numbers(traced: GraphModule) -> bool:
    """Return whether a graph, or one inside it, reads numbers out of tensors, or their values
    decide its sizes."""
    graphs = (one.graph for one in traced.modules() if isinstance(one, GraphModule))
    return any(map(_reads_numbers, graphs))


def _reads_numbers(graph: Graph) -> bool:
    checks = graph.find_nodes(op="call_function", target=private(_IN_RANGE), sort=False)
    read = checks or graph.find_nodes(op="call_method", target="item", sort=False)
    return bool(read) or any(map(_has_open_size, graph.nodes))


def has_open_sizes(traced: GraphModule) -> bool:
    """Return whether tensors' values decide a graph's sizes."""
    return any(map(_has_open_size, traced.graph.nodes))


def _has_open_size(node: Node) -> bool:
    made = node.meta.get("example_value")
    sizes = made.shape if isinstance(made, torch.Tensor) else ()
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    # A later operator may have decided a size: a layer that takes no other.
    decided = isinstance(made, torch.Tensor | tuple | list) and bool(node.meta.get(_MADE))
    return decided or (bool(symbols) and bool(private(_OPEN)(symbols)))


def without_numbers(traced: GraphModule) -> None:
    """Remove the numbers from a graph, in place, that it makes of tensors and reads only to check
    that they are within their range."""
    checks = private(_IN_RANGE)
    found = dict[Node, None]()

    def unread(node: Node) -> bool:
        alone = node.op != "output" and all(unread(user) for user in node.users)
        return alone and (bool(node.users) or node.target == checks or _is_number(node))

    def collect(node: Node) -> None:
        for user in node.users:
            collect(user)
        found.setdefault(node)  # after all that read it

    for item in [one for one in traced.graph.nodes if _is_number(one)]:
        if unread(item):
            collect(item)
    for node in found:
        traced.graph.erase_node(node)
    if found:
        traced.recompile()


def _is_number(node: Node) -> bool:
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return node.target == "item" or isinstance(node.meta.get("example_value"), kinds)


def without_unread(traced: GraphModule, nodes: Sequence[Node]) -> None:
    """Remove nodes of Dynamo's from a graph that is made of its own, in place, and what they are
    computed from, where nothing else reads it. Updates in place stay: other nodes may read them."""
    targets = {node.name: node.target for node in nodes}
    waiting = [one for one in traced.graph.nodes if targets.get(one.name, "") == one.target]
    erased = set[Node]()
    while waiting:
        node = waiting.pop()
        unread = not node.users and node.op in ("call_function", "call_method")
        if node not in erased and unread and updated_by(node) is None:
            waiting += node.all_input_nodes
            traced.graph.erase_node(node)
            erased.add(node)
    if erased:
        traced.recompile()


def updated_by(node: Node) -> Node | None:
    """Return the tensor that a call changes in place; None if it changes none."""
    name = getattr(node.target, "__name__", str(node.target))
    changed = node.kwargs.get("out", node.args[0] if node.args else None)
    in_place = name.endswith("_") or node.target in _IN_PLACE or "out" in node.kwargs
    return changed if in_place and isinstance(changed, Node) else None


def readers_of_numbers(handlers: Mapping[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """Return handlers by which Dynamo, given its own, traces `torch.arange(lengths.sum())` as
    `torch.arange(lengths.sum().item())`: what is read in the first is open."""
    return {one: _reading(handlers.get(one)) for one in (getattr(torch, name) for name in _SIZED)}


def _reading(other: Callable[..., Any] | None) -> Callable[..., Any]:
    def made(variable: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(one.is_tensor() for one in args):
            return other and other(variable, translator, *args, **kwargs)
        numbers = [
            one.call_method(translator, "item", [], {}) if one.is_tensor() else one for one in args
        ]
        return variable.call_function(translator, numbers, kwargs)

    return made


@contextlib.contextmanager
def kept_in_tensors(is_kept: Callable[[Any], bool]) -> Iterator[dict[str, torch.Tensor]]:
    """Trace inside with the numbers of these sources as numbers of tensors (`item()`). Yields these
    tensors, by the expressions that make them."""
    wrap, as_tensor = private(_WRAP), private(_SOURCE)
    made: dict[str, torch.Tensor] = {}

    def keeps(at: Any, value: Any) -> bool:
        return type(value) in _KINDS and abs(value) < _LARGEST and is_kept(at)

    def read(building: Any, value: Any) -> Any:
        if not keeps(building.source, value):
            return wrap(building, value)
        place = as_tensor(building.source)
        tensor = torch.tensor(value, dtype=_KINDS[type(value)], device="cpu")
        tensor = made.setdefault(place.name, tensor)
        found = type(building)(building.tx, place)(tensor)
        found.as_proxy().node.meta[KEPT] = value
        return found.call_method(building.tx, "item", [], {})

    def early(value: Any, source: Any = None, **options: Any) -> Any:
        found = later(value, source, **options)
        return found.realize() if keeps(source, value) else found

    with contextlib.ExitStack() as entered:
        entered.enter_context(patched(_WRAP, read))
        if known(_LATER):
            later = private(_LATER)
            entered.enter_context(patched(_LATER, staticmethod(early)))
        yield made

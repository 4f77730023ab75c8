"""Dynamo's reuse of equal regions (`torch.compiler.nested_compile_region`) for functions that are
not marked: a function that is called again with a like argument is traced once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from memopt.torch_private.access import known, patched, private, private_once
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_SUBGRAPHS = "torch._dynamo.variables.invoke_subgraph"
_CALL = "torch._dynamo.variables.UserFunctionVariable.call_function"
_REGION = f"{_SUBGRAPHS}.InvokeSubgraphHigherOrderVariable._call_function"
_BODY = f"{_SUBGRAPHS}.InvokeSubgraphHigherOrderVariable.create_wrapped_node"
_STAMPED = f"{_SUBGRAPHS}.stamp_out_subgraph"
_INPUTS = f"{_SUBGRAPHS}.build_subgraph_input_mapping"
_REUSABLE = f"{_SUBGRAPHS}.is_reusable"
_FLAT = f"{_SUBGRAPHS}.build_fingerprint_with_pytree"
_SAME = "torch._dynamo.variables.higher_order_ops.are_same_graph_modules"
_PATCHED = (_CALL, _REGION, _BODY, _STAMPED, _INPUTS, _REUSABLE, _FLAT, _SAME)
_USED = tuple(
    f"torch._dynamo.variables.{name}"
    for name in (
        "higher_order_ops.TorchHigherOrderOperatorVariable",
        "invoke_subgraph.classify_vt",
        "invoke_subgraph.InputFingerprint",
    )
)
_CONTAINERS = tuple(
    f"torch._dynamo.variables.{name}Variable" for name in ("List", "Tuple", "ConstDict")
)


@dataclass
class Reused:
    """What regions of a trace were taken from an earlier one.

    Attributes:
        replaced: for each region, the sources of the earlier one's arguments → of its own.
    """

    replaced: list[dict[Any, Any]] = field(default_factory=list)


def has_regions() -> bool:
    """Whether this torch reuses equal regions."""
    return all(map(known, (*_PATCHED, *_USED, *_CONTAINERS)))


@contextlib.contextmanager
def traced_once(functions: Set[CodeType], alike: Callable[[Any, Any], bool]) -> Iterator[Reused]:
    """Trace each of these functions once for like arguments; each call is a region in the graph,
    `torch.ops.higher_order.invoke_subgraph`. Regions are not nested.

    Args:
        functions: their code.
        alike: whether an argument that is read from somewhere and the one before it are alike,
            beside what Dynamo compares: it skips some guards, such as those on hooks.
    """
    reused, inside = Reused(), False
    states: list[tuple[Any, Any]] = []
    call, region, body, stamped, inputs, reusable, fingerprint, _ = map(private, _PATCHED)
    operator, tag_of, made = map(private, _USED)

    def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if inside or variable.get_function().__code__ not in functions:
            return call(variable, tx, args, kwargs)
        entered = operator.make(torch._higher_order_ops.invoke_subgraph)
        return entered.call_function(tx, [variable, *args], kwargs)

    def of_region(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        tx.output.export = False  # Dynamo reuses nothing while it exports
        try:
            return region(variable, tx, args, kwargs)
        finally:
            tx.output.export = True

    def of_body(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        tx.output.export = inside = True
        try:
            return body(variable, tx, *args, **kwargs)
        finally:
            tx.output.export = inside = False

    def with_sources(tx: Any, given: Any, flat: Any) -> Any:
        # While exporting, parameters are attributes of the graph, not its inputs.
        for proxy in given[2:]:
            meta, target = proxy.node.meta, proxy.node.target
            if proxy.node.op == "get_attr" and meta.get("grapharg") is None:
                source = tx.output.param_name_to_source.get(target)
                meta["grapharg"] = SimpleNamespace(source=source, example=None)
        found = inputs(tx, given, flat)
        states.append((found, _state()))
        return found

    def heard(tx: Any, condition: Any, given: Any, entry: Any) -> bool:
        made_in = [state for one, state in states if one is entry.subgraph_input_mapping]
        if made_in != [_state()] or not reusable(tx, condition, given, entry):
            return False
        pairs = zip(entry.arg_sources, given.arg_sources, strict=True)
        replaced = {a: b for a, b in pairs if a and b and a != b}
        value = tx.output.resolve_source_value
        if not all(alike(value(a), value(b)) for a, b in replaced.items()):
            return False
        reused.replaced.append(replaced)
        return True

    def stamped_out(tx: Any, *args: Any) -> Any:
        tx.output.export = True
        try:
            return stamped(tx, *args)
        finally:
            tx.output.export = False

    def same(*_: Any) -> bool:
        return False  # equal operators on other dtypes are another graph

    def flattened(tx: Any, args: Any, kwargs: Any) -> Any:
        leaves: list[Any] = []
        shape = _shape([list(args), kwargs], leaves)
        tags = [tag_of(leaf) for leaf in leaves]
        if None in tags:
            return fingerprint(tx, args, kwargs)
        sources = [getattr(leaf, "source", None) for leaf in leaves]
        return made(list(zip(tags, leaves, strict=True)), sources, False, shape)

    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_TRACE_AT_A_TIME)
        patches = (called, of_region, of_body, stamped_out, with_sources, heard, flattened, same)
        for name, value in zip(_PATCHED, patches, strict=True):
            stack.enter_context(patched(name, value))
        yield reused


def _state() -> tuple[Any, ...]:
    """Return the modes in which a region is traced."""
    cast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.get_default_dtype(), *cast


def _shape(value: Any, leaves: list[Any]) -> Any:
    """Return what of an argument Dynamo's flattening compares; append its leaves to `leaves`."""
    of_list, of_tuple, of_dict = map(private_once, _CONTAINERS)
    value = value.realize() if hasattr(value, "realize") else value
    kind = type(value)
    if kind in (of_list, of_tuple, list):
        items = value if kind is list else value.items
        return kind, *[_shape(one, leaves) for one in items]
    if kind in (of_dict, dict):
        pairs = value.items() if kind is dict else value.items.items()
        keys = [key if kind is dict else key.vt.as_python_constant() for key, _ in pairs]
        return kind, *keys, *[_shape(one, leaves) for _, one in pairs]
    leaves.append(value)
    return None

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
from memopt.torch_private.dynamo import container_inside, modified
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
_CLONE = "torch._guards.ChainedSource.clone"
_PATCHED = (_CALL, _REGION, _BODY, _STAMPED, _INPUTS, _REUSABLE, _FLAT, _SAME, _CLONE)
_USED = tuple(
    f"torch._dynamo.variables.{name}"
    for name in (
        "higher_order_ops.TorchHigherOrderOperatorVariable",
        "UserMethodVariable",
        "invoke_subgraph.classify_vt",
        "invoke_subgraph.InputFingerprint",
    )
)
_CONTAINERS = tuple(
    f"torch._dynamo.variables.{name}Variable" for name in ("List", "Tuple", "ConstDict")
)
_TRIED = ("2.13.",)
"""Versions of torch whose regions were compared with traces of every block."""
_COMPARED = ("TENSOR", "SYMNODE", "CONSTANT")
"""Kinds of arguments that Dynamo compares as they are."""

_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, torch.dtype, torch.device)
"""What has no identity."""


@dataclass
class Reused:
    """What regions of a trace were taken from an earlier one.

    Attributes:
        replaced: for each region, the sources of the earlier one's arguments → of its own.
    """

    replaced: list[dict[Any, Any]] = field(default_factory=list)


def has_regions() -> bool:
    """Whether this torch reuses equal regions in a way that was tried; else all are traced."""
    tried = torch.__version__.startswith(_TRIED)
    return tried and all(map(known, (*_PATCHED, *_USED, *_CONTAINERS)))


@contextlib.contextmanager
def traced_once(functions: Set[CodeType], alike: Callable[[Any, Any], bool]) -> Iterator[Reused]:
    """Trace each of these functions once for like arguments; each call is a region in the graph,
    `torch.ops.higher_order.invoke_subgraph`. Regions are not nested.

    Args:
        functions: their code.
        alike: whether an argument that is read from somewhere and the one before it are alike,
            beside what Dynamo compares: it skips some guards, such as those on hooks.
    """
    regions = _Regions(functions, alike)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_TRACE_AT_A_TIME)
        for name, value in zip(_PATCHED, regions.patches(), strict=True):
            stack.enter_context(patched(name, value))
        yield regions.reused


class _Regions:
    """What Dynamo's functions do otherwise while regions are traced once."""

    def __init__(self, functions: Set[CodeType], alike: Callable[[Any, Any], bool]) -> None:
        self.reused, self._functions, self._alike = Reused(), functions, alike
        self._inside, self._states, self._seen = False, list[tuple[Any, Any]](), list[Any]()
        self._transform: Any = None
        self._clones: dict[Any, Any] = {}
        self._read: dict[Any, Any] = {}
        self._plain = dict(zip(_PATCHED, map(private, _PATCHED), strict=True))
        self._operator, self._method, self._tag_of, self._fingerprint = map(private, _USED)

    def patches(self) -> tuple[Callable[..., Any], ...]:
        """Return the replacement of each patched function."""

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            return self._called(variable, tx, args, kwargs)

        def region(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            with _exporting(tx, False):  # Dynamo reuses nothing while it exports
                return self._plain[_REGION](variable, tx, args, kwargs)

        def body(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                with _exporting(tx, True):
                    return self._plain[_BODY](variable, tx, *args, **kwargs)
            finally:
                self._inside = False

        def stamped(tx: Any, *args: Any) -> Any:
            with _exporting(tx, True):
                return self._plain[_STAMPED](tx, *args)

        def same(*_: Any) -> bool:
            return False  # equal operators on other dtypes are another graph

        def clone(source: Any, transform: Any = None) -> Any:
            return self._cloned(source, transform)

        inputs, reusable, flat = self._inputs, self._reusable, self._flat
        return called, region, body, stamped, inputs, reusable, flat, same, clone

    def _called(self, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if (
            self._inside
            or variable.get_function().__code__ not in self._functions
            # Of a method (where the block has hooks) Dynamo compares all arguments but the block.
            or isinstance(variable, self._method)
        ):
            return self._plain[_CALL](variable, tx, args, kwargs)
        entered = self._operator.make(torch._higher_order_ops.invoke_subgraph)
        return entered.call_function(tx, [variable, *args], kwargs)

    def _inputs(self, tx: Any, given: Any, flat: Any) -> Any:
        # While exporting, parameters are attributes of the graph, not its inputs.
        for proxy in given[2:]:
            meta, target = proxy.node.meta, proxy.node.target
            if proxy.node.op == "get_attr" and meta.get("grapharg") is None:
                source = tx.output.param_name_to_source.get(target)
                meta["grapharg"] = SimpleNamespace(source=source, example=None)
        found = self._plain[_INPUTS](tx, given, flat)
        self._states.append((found, self._state(tx, flat)))
        return found

    def _reusable(self, tx: Any, condition: Any, given: Any, entry: Any) -> bool:
        made_in = [state for one, state in self._states if one is entry.subgraph_input_mapping]
        plain, self._transform = self._plain[_REUSABLE], None
        here = self._state(tx, given.flat_vts)
        if given.has_unknown or made_in != [here] or not plain(tx, condition, given, entry):
            return False
        read = (tag.name in _COMPARED or leaf.source is not None for tag, leaf in given.flat_vts)
        if not all(read):
            return False  # a module that the forward makes: nothing is known of it
        pairs = zip(entry.arg_sources, given.arg_sources, strict=True)
        replaced = {a: b for a, b in pairs if a and b and a != b}
        value = tx.output.resolve_source_value
        if not all(self._alike(value(a), value(b)) for a, b in replaced.items()):
            return False
        if replaced and not self._shares(tx, condition.traced_sources):
            return False
        self.reused.replaced.append(replaced)
        return True

    def _shares(self, tx: Any, read: Any) -> bool:
        """Whether the same paths lead to one object here as in the trace, which keeps the first
        path of each object."""
        here: dict[int, Any] = {}
        there: dict[int, Any] = {}
        scopes = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        known: dict[Any, Any] = {}
        for way in read:
            if way not in self._read:
                self._read[way] = tx.output.resolve_source_value(way)
            one = self._read[way]
            if one is None or isinstance(one, _VALUES):
                continue
            kept = tx.output.side_effects[one].source if one in tx.output.side_effects else None
            for source in (way, kept or way):
                mapped = source.clone(self._transform) if self._transform else source
                other = mapped.get_value(scopes, {}, known)
                pair = here.setdefault(id(one), other), there.setdefault(id(other), one)
                if pair[0] is not other or pair[1] is not one:
                    return False
        return True

    def _state(self, tx: Any, flat: Any) -> tuple[Any, ...]:
        """Return the state that a trace depends on besides its arguments' sources and layouts."""
        changed = list(_changed(tx.output.side_effects))
        self._seen += changed  # no other object gets the address of one
        nodes = [leaf.as_proxy().node for tag, leaf in flat if tag.name == "TENSOR"]
        return _state(), [nodes.index(node) for node in nodes], list(map(id, changed))

    def _cloned(self, source: Any, transform: Any) -> Any:
        # A block's sources have most of their ways in common: each is changed once.
        if transform is not self._transform:
            self._transform, self._clones = transform, {}
        if source not in self._clones:
            self._clones[source] = self._plain[_CLONE](source, transform)
        return self._clones[source]

    def _flat(self, tx: Any, args: Any, kwargs: Any) -> Any:
        leaves: list[Any] = []
        shape = _shape([list(args), kwargs], leaves)
        tags = [self._tag_of(leaf) for leaf in leaves]
        if None in tags:
            return self._plain[_FLAT](tx, args, kwargs)
        sources = [getattr(leaf, "source", None) for leaf in leaves]
        return self._fingerprint(list(zip(tags, leaves, strict=True)), sources, False, shape)


@contextlib.contextmanager
def _exporting(tx: Any, whether: bool) -> Iterator[None]:
    before, tx.output.export = tx.output.export, whether
    try:
        yield
    finally:
        tx.output.export = before


def _state() -> tuple[Any, ...]:
    """Return the modes in which a region is traced."""
    cast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.get_default_dtype(), *cast


def _changed(effects: Any) -> Iterator[Any]:
    """Yield what the trace has changed objects to that were there before, so far: Dynamo asks them
    for their values of before, and does not see all changes."""
    for one in modified(effects):
        if type(one.mutation_type).__name__.endswith("MutationExisting"):
            yield from _held(one, effects, 3)


def _held(variable: Any, effects: Any, levels: int) -> Iterator[Any]:
    """Yield a variable and what is in it; a new object, like no other, for what is deeper."""
    yield variable
    items = vars(variable).get("items", ())
    inside = [*effects.store_attr_mutations.get(variable, {}).values()]
    if isinstance(items, dict):
        inside += [one.vt for one in items]
        items = items.values()
    inside += items
    container = container_inside(variable)
    inside += [] if container is None else [container]
    for one in inside:
        yield from _held(one, effects, levels - 1) if levels else [object()]


def _shape(value: Any, leaves: list[Any]) -> Any:
    """Return the part of an argument that Dynamo's flattening compares; append its leaves to
    `leaves`."""
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

"""Reads Dynamo's side effects: a forward's changes to Python objects that existed before it.

`torch.compile` runs its graph and then makes these changes; an export, by which memopt captures,
drops them. So they are read as plain data while dynamo still has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memopt.errors import CaptureError
from memopt.torch_private.dynamo import container_inside, modified, updates_heard, visit
from memopt.torch_private.modes import function_modes
from memopt.torch_private.table import SUPPORTED


@dataclass(frozen=True)
class Constant:
    """A value that the trace knows: a number, a text, a function, a class, or a list of them."""

    value: Any


@dataclass(frozen=True)
class Existing:
    """An object that existed before the forward; each call reads it from its own place."""

    source: str


@dataclass(frozen=True)
class Traced:
    """A value that each call makes: a tensor, or a container with tensors in it."""


@dataclass(frozen=True)
class Number(Traced):
    """A number that each call reads out of tensors."""


@dataclass(frozen=True)
class Array(Traced):
    """A NumPy array that each call makes, or a container with one in it."""


Value = Constant | Existing | Traced


@dataclass(frozen=True)
class Change:
    """One change of one object.

    Attributes:
        source: the object, as Dynamo's expression.
        kind: "attribute" and "item" are set, "deleted attribute" and "deleted item" are removed,
            "append" adds values at the end of a list, "clear" comes before the items of a dict that
            are set, "add" and "discard" are a set's; anything else is a kind that memopt does not
            know, in Dynamo's words.
        name: the attribute or key; for "append", how many items stay as they are.
        values: the values that are set, added or discarded.
        path: replaces the source of an argument of the call: its position or name, then the indices
            and keys of the containers in it.
    """

    source: str
    kind: str
    name: Any = None
    values: tuple[Value, ...] = ()
    path: tuple[Any, ...] = ()

    @property
    def known(self) -> bool:
        """Return whether memopt can make this change."""
        return self.kind in _KNOWN

    @property
    def places(self) -> tuple[str, ...]:
        """Return the expressions by which Dynamo's guards read the changed value."""
        if "attribute" not in self.kind:
            return (self.source,)
        return f"{self.source}.{self.name}", f"{self.source}.__dict__[{self.name!r}]"

    def in_its_place(self, name: str) -> bool:
        """Return whether a guard's expression reads what one attribute or item is set to."""
        return name in (*self.places[-2:], f"{self.source}[{self.name!r}]")


def is_of_number(change: Change) -> bool:
    """Return whether a change sets an attribute or an item to a number that the trace knows."""
    return all(isinstance(v, Constant) and type(v.value) in (int, float) for v in change.values)


REGISTRIES = ("._parameters", "._buffers", "._modules")
"""Ends of expressions for a module's own dicts, whose keys users know as its attributes."""

HOOK = "hook"
"""Kind of the change that sets a hook on a tensor."""
RETURNS_ARRAY = (
    "the model returns a NumPy array, or puts one into an argument, and planned steps would give a "
    "tensor there: return the tensor (h.detach()), and call .numpy() on it outside of the model"
)
_KNOWN = (
    "attribute",
    "item",
    "deleted attribute",
    "deleted item",
    "append",
    "clear",
    "add",
    "discard",
)


@contextlib.contextmanager
def changes_heard() -> Iterator[Callable[[], tuple[Change, ...]]]:
    """Record the side effects of the traces made inside. Yields a function that returns the lasting
    changes of the last trace.

    Only one thread at a time may enter it.

    Raises:
        CaptureError: in the trace, if this torch keeps its side effects elsewhere.
    """
    heard: tuple[Change, ...] = ()
    modes = len(function_modes())

    def listening(effects: Any) -> None:
        nonlocal heard
        try:
            heard = _changes(effects, modes)
        except AttributeError as error:
            raise CaptureError(
                f"this torch ({torch.__version__}) keeps what a forward changes elsewhere "
                f"({error}); memopt supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
            ) from error
        stack = effects.output_graph_weakref().root_tx.stack
        if stack and _holds_array(stack[-1]):
            raise CaptureError(RETURNS_ARRAY)

    with updates_heard(listening):
        yield lambda: heard


def _changes(effects: Any, modes: int) -> tuple[Change, ...]:
    found: list[Change] = []
    for variable in modified(effects):
        if not type(variable.mutation_type).__name__.endswith("MutationExisting"):
            continue
        if _is_a(variable, "TorchFunctionModeStackVariable"):
            left = variable.symbolic_stack
            if len(left) == modes and all(one.source is not None for one in left):
                continue  # modes that the forward enters, it leaves
            raise CaptureError(
                "the forward sets torch's default device, or leaves a mode behind, which decides "
                "what is computed from then on, and planned steps would not: set it before planning"
            )
        found += _of(variable, expression_of(variable.source), effects)
    # Hooks on tensors that the forward makes are in the graph.
    for tensor, *_ in effects.tensor_hooks.values():
        if _has_place(tensor):
            found.append(Change(expression_of(tensor.source), HOOK))
    return tuple(found)


def _of(variable: Any, source: str, effects: Any) -> Iterator[Change]:
    """Yield the lasting changes of one of Dynamo's variables."""
    attributes = dict(effects.store_attr_mutations.get(variable, {}))
    # The items of an object that is a container may be a variable of their own.
    inner, kind = container_inside(variable), variable.mutation_type
    if inner is not None and effects.is_modified(inner):
        yield from _of_container(inner, source)
    elif _is_a(kind, "ValueMutationExisting") and kind.is_modified:
        yield from _of_container(variable, source)
    for name, value in attributes.items():
        if _is_a(value, "DeletedVariable"):
            yield Change(source, "deleted attribute", name)
            continue
        if not _read_from(_unwrapped(value), f"{source}.{name}"):
            yield Change(source, "attribute", name, (_value(value),))


def _of_container(variable: Any, source: str) -> Iterator[Change]:
    if _is_a(variable, "ListVariable", "DequeVariable"):
        items = list(map(_unwrapped, variable.items))
        stay = 0
        while stay < len(items) and _read_from(items[stay], f"{source}[{stay}]"):
            stay += 1
        yield Change(source, "append", stay, tuple(map(_value, items[stay:])))
    elif _is_a(variable, "SetVariable"):
        now, before = _keys(variable.items), _keys(variable.original_items)
        if any(isinstance(key, Traced) for key in now):
            yield Change(source, "tensor in a set")
            return
        for kind, these, others in (("add", now, before), ("discard", before, now)):
            values = tuple(key for key in these if key not in others)
            if values:
                yield Change(source, kind, None, values)
    elif _is_a(variable, "ConstDictVariable"):
        yield from _of_dict(variable, source)
    else:
        yield Change(source, type(variable).__name__.removesuffix("Variable"))


def _of_dict(variable: Any, source: str) -> Iterator[Change]:
    now, before = _keys(variable.items), _keys(variable.original_items)
    if not all(isinstance(key, Constant) for key in (*now, *before)):
        yield Change(source, "item with such a key")
        return
    new = [key for key in now if key not in before]
    order = [key for key in before if key in now] + new
    if order == list(now):
        for key in before:
            if key not in now:
                yield Change(source, "deleted item", getattr(key, "value", None))
        now = {key: one for key, one in now.items() if key in new or not _one(one, before[key])}
    else:
        yield Change(source, "clear")
    for key, one in now.items():
        yield Change(source, "item", getattr(key, "value", None), (_value(one),))


def _keys(items: Any) -> dict[Value, Any]:
    """Return the items of a dict's or set's variable by their keys."""
    keys = {_unwrapped(getattr(key, "vt", key)): value for key, value in items.items()}
    return {_constant(key) or _value(key): value for key, value in keys.items()}


def _one(value: Any, other: Any) -> bool:
    """Return whether two of Dynamo's variables are the same."""
    return _unwrapped(value) is _unwrapped(other)


def _value(variable: Any) -> Value:
    variable = _unwrapped(variable)
    if _holds_array(variable):
        return Array()
    if _is_a(variable, "SymNodeVariable"):
        return Number()
    is_tensor = _is_a(variable, "TensorVariable")
    if _has_place(variable):
        return Traced() if is_tensor else Existing(expression_of(variable.source))
    return Traced() if is_tensor else _constant(variable) or Traced()


def _holds_array(variable: Any) -> bool:
    """Return whether one of Dynamo's variables is a NumPy array, or a container with one in it."""
    found: list[Any] = []

    def look(one: Any) -> None:
        if _is_a(one, "NumpyNdarrayVariable"):
            found.append(one)

    visit(look, variable)
    return bool(found)


def _constant(variable: Any) -> Constant | None:
    if variable.is_python_constant():
        with contextlib.suppress(NotImplementedError):
            return Constant(variable.as_python_constant())
    return None


def _has_place(variable: Any) -> bool:
    """Return whether a value existed before the forward, in a place of its own."""
    source = variable.source
    return source is not None and type(source).__name__ != "TempLocalSource"


def _read_from(variable: Any, place: str) -> bool:
    return _has_place(variable) and expression_of(variable.source) == place


def _unwrapped(variable: Any) -> Any:
    """Return the variable that replaces a lazy one that was used; realizing others adds guards."""
    return variable.realize() if getattr(variable, "is_realized", lambda: False)() else variable


def _is_a(variable: Any, *names: str) -> bool:
    """Return whether one of Dynamo's variables has a class of one of these names; the classes'
    modules differ between versions of torch."""
    return any(one.__name__ in names for one in type(variable).__mro__)


def expression_of(value: Any) -> Any:
    """Return the expression of one of Dynamo's sources, whose name is a property or a method;
    return any other value unchanged."""
    if not hasattr(value, "guard_source"):
        return value
    name = value.name
    return name() if callable(name) else name

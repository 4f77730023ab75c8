"""Replaces the frame that Dynamo traces around a model: it takes the flat arguments, calls the
model, and also returns values that the model leaves in Python objects, or branches on.

Dynamo does not notice changes to lists and dicts among the arguments, since they are made anew
inside the frame: the frame compares them before and after.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from memopt.step.changes import Change, Constant, Traced
from memopt.step.inputs import Call
from memopt.torch_private import pytree
from memopt.torch_private.dynamo import frame_replaced

_FRAME = "L['self']"
_usual: ContextVar[dict[str, Any]] = ContextVar("frame", default={})  # noqa: B039
"""The attributes of the frame to trace."""

Contents = tuple[tuple[Any, ...], Any, list[Any], list[Any]]
"""A container among the arguments: path, itself, its indices or keys, its items."""
Place = tuple[tuple[Any, ...], Any, str, Any]
"""Where values are left: an argument's path or else the object, kind and name of the change."""
Found = tuple[tuple[Any, ...], str, Any, int]
"""A change of an argument: path, kind, name, number of values."""


@contextlib.contextmanager
def arguments_compared(call: Call) -> Iterator[None]:
    """Record changes to lists and dicts among the arguments in the traces made inside."""
    if not any(isinstance(one, (list, dict)) for one in _containers((call.args, call.kwargs))):
        yield
        return
    with _frame({"contents": _contents, "compare": _changed, "found": ()}):
        yield


@contextlib.contextmanager
def values_returned(places: Sequence[Place]) -> Iterator[None]:
    """Make the traces inside also return the values that the forward leaves in these places."""
    # Dynamo takes an empty list inside a tuple for a constant: so each owner is an attribute.
    owners = {f"owner_{i}": owner for i, (_, owner, _, _) in enumerate(places)}
    steps = tuple((path, kind, name) for path, _, kind, name in places)
    with _frame({**owners, "steps": steps, "values": _values}):
        yield


@contextlib.contextmanager
def branches_returned(begin: Callable[[], None], values: Callable[[], Any]) -> Iterator[None]:
    """Make the traces inside return a pair of their usual result and `values()`, if that is not
    empty at their end. `begin` is called when a trace begins."""
    with _frame({**_usual.get(), "branched": values}, begin):
        yield


def with_arguments(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield the changes of a trace. What the frame has recorded about the call's arguments is
    yielded as changes that have a path."""
    for change in changes:
        if change.source != _FRAME:
            yield change
        elif isinstance(change.values[0], Constant):
            for path, kind, name, count in change.values[0].value:
                yield Change("", kind, name, (Traced(),) * count, path)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the containers inside a container."""
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, (list, tuple, dict)):
            yield one
            yield from _containers(one)


@contextlib.contextmanager
def _frame(attributes: dict[str, Any], begin: Callable[[], None] | None = None) -> Iterator[None]:
    """Make Dynamo trace another frame around the model, in place of torch's own."""

    def replaced(usual: Any, scope: dict[str, Any]) -> Callable[..., Any]:
        own = types.FunctionType(_forward.__code__, scope, "forward")
        usual = getattr(usual, "usual", usual)  # inside of another such context

        def made(model: Any, spec: Any) -> Any:
            if begin is not None:
                begin()
            frame = type("ModuleToTrace", (usual,), {"forward": own})(model, spec)
            frame.__dict__.update({"compare": None, "values": None, "branched": None, **attributes})
            return frame

        made.usual = usual  # type: ignore[attr-defined]
        return made

    before = _usual.set(attributes)
    try:
        with frame_replaced(replaced):
            yield
    finally:
        _usual.reset(before)


def _forward(self: Any, *flat_args: Any) -> Any:
    """Run as the frame, with the globals of torch's own."""
    args, kwargs = pytree.tree_unflatten(flat_args, self.in_spec)
    before = None if self.compare is None else self.contents(args, kwargs)
    res = self._export_root(*args, **kwargs)
    found = None if self.compare is None else self.compare(before)
    if found:
        self.found = found
    if self.values is not None:
        res = (res, self.values(self, args, kwargs))
    met = () if self.branched is None else self.branched()
    if met:
        res = (res, met)
    out_flat, out_spec = pytree.tree_flatten(res)
    return ExportTracerOutput(out_flat, out_spec)  # type: ignore[name-defined]  # noqa: F821


def _contents(args: Any, kwargs: Any) -> list[Contents]:
    """Return the contents of the containers among the arguments."""
    found: list[Contents] = []
    for i, value in enumerate(args):
        _look_into(value, (i,), found)
    for key, value in kwargs.items():
        _look_into(value, (key,), found)
    return found


def _look_into(value: Any, path: tuple[Any, ...], found: list[Contents]) -> None:
    if isinstance(value, (list, tuple)):
        items = list(value)
        found.append((path, value, list(range(len(items))), items))
    elif isinstance(value, dict):
        items = list(value.values())
        found.append((path, value, list(value.keys()), items))
    else:
        return
    _, _, keys, items = found[-1]
    for i in range(len(items)):
        _look_into(items[i], (*path, keys[i]), found)


def _changed(before: list[Contents]) -> tuple[Found, ...]:
    """Return how the containers differ from their earlier contents."""
    found: list[Found] = []
    for path, value, keys, items in before:
        new: list[Any] = []
        if isinstance(value, list):
            stay = 0
            while stay < len(items) and stay < len(value) and value[stay] is items[stay]:
                stay += 1
            new = value[stay:]
            if stay < len(items) or new:
                found.append((path, "append", stay, len(new)))
        elif isinstance(value, dict):
            for i in range(len(keys)):
                if keys[i] not in value:
                    found.append((path, "deleted item", keys[i], 0))
                elif value[keys[i]] is not items[i]:
                    new.append(value[keys[i]])
                    found.append((path, "item", keys[i], 1))
            for key in list(value.keys()):
                if key not in keys:
                    new.append(value[key])
                    found.append((path, "item", key, 1))
        for one in new:
            for _, other, _, _ in before:
                if one is other:  # a planned step would put another object there
                    return ((path, "move of a container", None, 0),)
    return tuple(found)


def _values(frame: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Return the present values in the objects that the forward has changed."""
    found = []
    for i in range(len(frame.steps)):
        path, kind, name = frame.steps[i]
        if path:
            owner = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
            for key in path[1:]:
                owner = owner[key]
        else:
            owner = getattr(frame, f"owner_{i}")
        if kind == "attribute":
            found.append([getattr(owner, name)])
        elif kind == "item":
            found.append([owner[name]])
        else:
            found.append(owner[name:] if isinstance(owner, list) else list(owner)[name:])
    return found

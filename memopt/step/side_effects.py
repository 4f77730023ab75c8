"""Repeats a forward's side effects on Python objects in planned steps.

A forward may leave tensors in a list of losses, a dict of features or `self.last_attention`; its
graph computes them and returns none. So the model is traced once more with these values as outputs.
After each planned forward they are put where the model puts them, in its order. They have gradients
as all outputs do.

A value that the trace sees as a constant (a flag that is set) is set anew at each call. A number
that differs at each call (a counter) is traced as a tensor's number; another such value is refused,
and the object named.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any, TypeAlias

from torch import nn

from memopt.errors import CaptureError
from memopt.step.changes import (
    HOOK,
    REGISTRIES,
    Array,
    Change,
    Constant,
    Existing,
    Number,
)
from memopt.step.described import same
from memopt.step.inputs import Call
from memopt.step.reader import GONE, TraceReader
from memopt.step.traced_arguments import Place, with_arguments

Read: TypeAlias = Callable[[nn.Module, Call], Any]
"""Function that reads an object, given the model and the call."""


@dataclass(frozen=True)
class Effect:
    """A change that each call makes to one object.

    Attributes:
        change: the change. Its kind "replace" gives a list other items from one position on.
        owner: reads the object where the forward finds it.
        shown: the object, for people.
        path: for an argument of the call, the way to the object: a position or name, then indices
            and keys; else empty.
        values: the values set or added: a constant, a function that reads an existing object, or
            None for a value that the call makes.
    """

    change: Change
    owner: Read
    shown: str
    path: tuple[Any, ...] = ()
    values: tuple[Constant | Read | None, ...] = ()

    @property
    def is_made_by_call(self) -> bool:
        """Return whether its values come from the graph: if one does, all do."""
        return None in self.values

    @property
    def text(self) -> str:
        """Return a text that identifies the effect."""
        values = [repr(v) if isinstance(v, Constant) else v is None for v in self.values]
        name = "" if self.change.kind == "append" else repr(self.change.name)
        return f"{self.shown} {self.change.kind} {name} {values}"

    def resolved(self, model: nn.Module, call: Call) -> list[Any]:
        """Return the change's values: constants copied, existing objects read; None where only the
        graph computes a value."""
        return [
            copy.deepcopy(v.value) if isinstance(v, Constant) else v and v(model, call)
            for v in self.values
        ]


@dataclass(frozen=True)
class SideEffects:
    """All side effects of a forward."""

    effects: tuple[Effect, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.effects)

    def __str__(self) -> str:
        """Return a text that identifies the effects."""
        return "\n".join(one.text for one in self.effects)

    @property
    def shown(self) -> list[str]:
        """Return the changed objects, for people."""
        return list(dict.fromkeys(one.shown for one in self.effects))

    @property
    def made_by_call(self) -> tuple[Effect, ...]:
        """Return the effects for which the graph returns values."""
        return tuple(one for one in self.effects if one.is_made_by_call)

    @property
    def are_constant(self) -> bool:
        """Return whether every call sets the same constants."""
        return all(isinstance(v, Constant) for one in self.effects for v in one.values)

    def places(self, model: nn.Module, call: Call) -> list[Place]:
        """Return the places that get values from the graph."""
        return [
            (
                one.path,
                None if one.path else one.owner(model, call),
                one.change.kind,
                one.change.name,
            )
            for one in self.made_by_call
        ]

    def carry_out(self, model: nn.Module, call: Call, made: Sequence[Any]) -> None:
        """Change the objects as the forward does."""
        rest = iter(made)
        steps = [
            (
                one.change,
                one.owner(model, call),
                list(next(rest)) if one.is_made_by_call else one.resolved(model, call),
            )
            for one in self.effects
        ]
        for change, owner, values in steps:
            _make(change, owner, values)

    def other_constants(self, model: nn.Module, call: Call) -> list[Change]:
        """Return the changes that give attributes or items constants other than their present
        values."""
        found = []
        for one in self.effects:
            name, owner = one.change.name, one.owner(model, call)
            if one.is_made_by_call or one.change.kind not in ("attribute", "item"):
                continue
            look = _attribute if one.change.kind == "attribute" else _item
            if not same(look(owner, name), one.resolved(model, call)[0]):
                found.append(one.change)
        return found


NO_EFFECTS = SideEffects()


def side_effects(model: nn.Module, call: Call, reader: TraceReader) -> SideEffects:
    """Return the side effects of a trace.

    Raises:
        CaptureError: a planned step could not repeat one; the message names the object.
    """
    exchanged = [c for c in reader.changes if c.source.endswith(("._parameters", "._modules"))]
    if exchanged:
        # Optimizers know parameters by identity, not by name.
        raise CaptureError(why_not_left_behind([_of_object(c, reader).shown for c in exchanged]))
    effects = []
    for change in with_arguments(reader.changes):
        effect = _of_argument(change) if change.path else _of_object(change, reader)
        if change.kind == HOOK:
            raise CaptureError(
                f"the forward sets a hook on {effect.shown}, which is there before it, and planned "
                "steps would not: set it once, before planning"
            )
        if any(isinstance(value, Array) for value in change.values):
            raise CaptureError(
                f"the forward leaves a NumPy array in {effect.shown}, and planned steps would "
                "leave a tensor there: keep the tensor (h.detach()), and call .numpy() on it "
                "outside of the model"
            )
        if Number() in change.values and reader.takes_for_constant(change):
            raise CaptureError(
                f"the forward makes {effect.shown} of its last value and of a number of a tensor, "
                "so that each step would need a plan of its own: keep it in a buffer, and update "
                "that by tensor operators (self.mean.lerp_(x.mean().detach(), 0.1))"
            )
        if _is_a_setting(change, effect.owner, model, call):
            raise CaptureError(why_not_set(effect.shown))
        if not change.known:
            raise CaptureError(why_not_left_behind([effect.shown]))
        if change.kind == "append":
            if getattr(effect.owner(model, call), "maxlen", None) is not None:
                raise CaptureError(
                    f"the forward adds to {effect.shown}, a deque with maxlen=, of which a trace "
                    "does not see what it drops: use a list, and drop items outside of the forward"
                )
            if len(effect.owner(model, call)) != change.name:
                effect = replace(effect, change=replace(change, kind="replace"))
            elif not change.values:
                continue  # it keeps its length
        effects.append(effect)
    return SideEffects(tuple(effects))


def why_not_set(setting: str) -> str:
    """Return the message on a setting of torch's that the forward changes."""
    return (
        f"the forward sets {setting}, which decides how torch computes from then on, and planned "
        "steps would not: set it before planning, or pass what it decides to the operators "
        "(dtype=, device=)"
    )


def _is_a_setting(change: Change, owner: Read, model: nn.Module, call: Call) -> bool:
    """Return whether a change is to one of torch's settings (`torch.backends.cudnn.benchmark`)."""
    if change.kind != "attribute" or change.path:
        return False
    kind = type(owner(model, call))
    return kind.__module__.startswith("torch.") and hasattr(
        getattr_static(kind, change.name, None), "__set__"
    )


def why_not_left_behind(shown: Sequence[str]) -> str:
    """Return the message on objects that the forward changes and a planned step could not."""
    return (
        f"the forward changes Python state of {', '.join(shown)} in a way that a planned step "
        "cannot repeat: an iterator, an object of a class of its own, a count that decides shapes "
        "or that a backward may read. Return such values as outputs, count outside of the forward "
        "or in a buffer that is updated in place (self.count.add_(1)); if this is a cache that the "
        "first call builds, call the model once before planning"
    )


def _of_object(change: Change, reader: TraceReader) -> Effect:
    values = tuple(
        reader.read_later(v.source)
        if isinstance(v, Existing)
        else v
        if isinstance(v, Constant)
        else None
        for v in change.values
    )
    if None in values:
        values = (None,) * len(values)
    shown = reader.shown(change.source)
    if "item" in change.kind and change.source.endswith(REGISTRIES):
        shown = f"{shown.rpartition('.')[0]}.{change.name}"
    elif "attribute" in change.kind and change.name != "cell_contents":
        shown = f"{shown}.{change.name}"
    return Effect(change, reader.read_later(change.source), shown, values=values)


def _of_argument(change: Change) -> Effect:
    first, *rest = change.path

    def owner(_model: nn.Module, call: Call) -> Any:
        given: Any = call.kwargs if isinstance(first, str) else call.args
        for key in change.path:
            given = given[key]
        return given

    name = f"argument {first!r}" + "".join(f"[{key!r}]" for key in rest)
    return Effect(change, owner, name, change.path, (None,) * len(change.values))


def _make(change: Change, owner: Any, values: Sequence[Any]) -> None:
    """Make a change to its owner, with these values."""
    match change.kind:
        case "attribute":
            _setter(owner)(owner, change.name, values[0])
        case "deleted attribute":
            with suppress(AttributeError):  # the forward set it before; planned steps do not
                delattr(owner, change.name)
        case "item":
            _dict(owner).__setitem__(owner, change.name, values[0])
        case "deleted item":
            _dict(owner).__delitem__(owner, change.name)
        case "clear":
            _dict(owner).clear(owner)
        case "append":
            owner.extend(values)
        case "replace":
            while len(owner) > change.name:
                owner.pop()
            owner.extend(values)
        case "add":
            owner.update(values)
        case _:
            owner.difference_update(values)


def _item(owner: Any, name: Any) -> Any:
    return owner.get(name, GONE)


def _attribute(owner: Any, name: str) -> Any:
    """Return an object's own attribute; GONE if it has none, even if its class has one."""
    return getattr(owner, name, GONE) if name in getattr(owner, "__dict__", (name,)) else GONE


def _dict(owner: Any) -> Any:
    """Return the class whose methods change a dict: its own may do more, which was traced."""
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _setter(owner: Any) -> Callable[[Any, str, Any], None]:
    """Return what sets an attribute: a class's `__setattr__` may do more, which was traced."""
    if isinstance(owner, nn.Module):
        return nn.Module.__setattr__
    is_pythons = inspect.isfunction(type(owner).__setattr__)
    return object.__setattr__ if is_pythons and not isinstance(owner, type) else setattr

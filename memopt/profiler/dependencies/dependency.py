"""One Python thing that a trace read, and what it was when the graph was captured."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import Any

import torch

HOOKS = re.compile(r"\._(?:global_)?((?:forward|backward)(?:_pre)?)_hooks$")
"""An expression that reads the hooks of a module, or of all."""


class Gone:
    """What is found where nothing can be read any more."""

    def __repr__(self) -> str:
        return "nothing"


GONE = Gone()

UNREADABLE = (AttributeError, KeyError, IndexError, TypeError, ValueError, NameError)
"""What reading raises where an object on the way is gone or another."""

_LONGEST = 80


def same(found: Any, planned: Any) -> bool:
    """Whether two values are one to a trace. Signed zeros are two; NaN is NaN."""
    if found is planned:
        return True
    if type(found) is not type(planned):
        return False
    if isinstance(found, (float, complex)):
        return repr(found) == repr(planned)
    if isinstance(found, tuple):
        return len(found) == len(planned) and all(map(same, found, planned))
    return bool(found == planned)


@dataclass(frozen=True, eq=False)
class Dependency:
    """One thing that the trace read.

    Attributes:
        shown: where, for people.
        source: where, as an expression over `model`.
        look: what about it counts, as an expression over `model`.
        planned: what the look gave when the graph was captured.
        identity: whether it must be the same object, not just an equal one.
        shared: whether it is a global thing, which others change for reasons of their own.
    """

    shown: str
    source: str
    look: str
    planned: Any
    identity: bool = False
    shared: bool = False

    def differs(self, found: Any) -> bool:
        """Whether what the look gives now is not what was planned."""
        return found is not self.planned if self.identity else not same(found, self.planned)

    def difference(self, found: Any) -> str:
        """For people: where, what was planned, and what is there now."""
        hooks = HOOKS.search(self.source)
        if hooks is not None and isinstance(found, tuple):
            return self._other_hooks(hooks[1].replace("_", "-"), found)
        asked = re.match(r"hasattr\(.*, (.*)\)$|(.*) in |.*( is )", self.look)
        if asked is None or found is GONE:
            return f"{self.shown}: planned {self._text(self.planned)}, got {self._text(found)}"
        if asked[3]:
            return f"{self.shown}: planned as one object, got two"
        name = asked[1] or asked[2]
        if found:
            return f"{self.shown} has {name}, and was planned without"
        return f"{self.shown} was planned with {name}, and is without"

    def _other_hooks(self, kind: str, found: tuple[Any, ...]) -> str:
        module = self.shown.rpartition("._")[0]
        for hook in found:
            if not any(hook is one for one in self.planned):
                return f"{module} has the {kind} hook {_name(hook)}, and was planned without"
        for hook in self.planned:
            if not any(hook is one for one in found):
                return f"{module} was planned with the {kind} hook {_name(hook)}, and is without"
        return f"{module} has its {kind} hooks in another order than planned"

    def _text(self, value: Any) -> str:
        if isinstance(value, Gone):
            return repr(value)
        if self.look.startswith("described("):
            return described_text(value)
        if self.look.startswith("len("):
            return f"{value} items"
        if self.look.startswith("tuple("):
            return f"the keys {list(value)}"
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.CodeType)):
            return _name(value)
        text = repr(value)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _name(value: Any) -> str:
    """A function or class by its name, and its place if it is written in Python."""
    code = getattr(value, "__code__", value)
    if isinstance(code, types.CodeType):
        name = getattr(value, "__qualname__", code.co_qualname)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def described(value: Any) -> tuple[Any, ...]:
    """What must be equal for two values to be the same to a captured graph."""
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    # NaN is no reason to refuse: it is compared by its text.
    return ("value", type(value), value if value == value else repr(value))


def described_text(description: tuple[Any, ...]) -> str:
    """A description for people."""
    if description[0] == "tensor":
        _, shape, stride, dtype, device, grad = description
        suffix = ", requires_grad" if grad else ""
        name = str(dtype).removeprefix("torch.")
        return f"{name}{list(shape)} stride {stride} on {device}{suffix}"
    return repr(description[2])

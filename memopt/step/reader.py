"""Turns what a trace read into expressions over the model, with their values at capture."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.step.changes import Change, Number
from memopt.step.described import described, described_text, has, same
from memopt.step.dynamo_guards import DynamoGuard, TraceGuards
from memopt.torch_private.expressions import DEFAULT_DEVICE, GLOBAL_HOOKS, ROOT

HOOKS = re.compile(r"\._(?:global_)?((?:forward|backward)(?:_pre)?)_hooks$")
"""Expression that reads the hooks of a module, or of all modules."""

_DYNAMOS_OWN = ("__init__", "__setstate__")
"""Functions of nn.Module that dynamo replaces by its own when torch.compile is first used."""


class Gone:
    """Stands for a value that cannot be read any more."""

    def __repr__(self) -> str:
        return "nothing"


GONE = Gone()

UNREADABLE = (AttributeError, KeyError, IndexError, TypeError, ValueError, NameError)
"""Errors of reading an expression if an object on the way is gone or replaced."""

_LONGEST = 80


@dataclass(frozen=True, eq=False)
class Dependency:
    """One value that the trace read and relied on.

    Attributes:
        shown: the place, for people.
        source: the place, as an expression over `model`.
        look: the property that counts, as an expression over `model`.
        planned: the look's value when the graph was captured.
        identity: whether the value must be the same object, not just an equal one.
        shared: whether the value is global, so that others may change it, or changed by the
            forward.
    """

    shown: str
    source: str
    look: str
    planned: Any
    identity: bool = False
    shared: bool = False

    def differs(self, found: Any) -> bool:
        """Return whether the look's present value is not the planned one."""
        return found is not self.planned if self.identity else not same(found, self.planned)

    def difference(self, found: Any) -> str:
        """Return a text for people: the place, the planned value, and the present one."""
        hooks = HOOKS.search(self.source)
        if hooks is not None and isinstance(found, tuple):
            return self._other_hooks(hooks[1].replace("_", "-"), found)
        asked = re.match(r"has\(.*, (.*)\)$|(.*) in |.*( is )", self.look)
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
    """Return the name of a function or class, and its place if it is written in Python."""
    code = getattr(value, "__code__", value)
    if isinstance(code, types.CodeType):
        name = getattr(value, "__qualname__", code.co_qualname)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


_ITSELF = "{x}"

_UNGUARDED = ("2.11.", "2.12.")
"""Versions of torch whose traces have no guards on default arguments."""

# Kinds of guards that ask for the same object.
_IDENTITY = ("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH")

# Kind of guard → what is compared; {x} is the guarded value, {a} the guard's detail. Other kinds
# compare the type.
_LOOKS = {
    **dict.fromkeys(_IDENTITY, _ITSELF),
    **dict.fromkeys(
        ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "CONSTANT_SUBCLASS_MATCH"),
        _ITSELF,
    ),
    # Closures are made anew all the time; the variables that they capture have guards of their own.
    "CLOSURE_MATCH": "getattr({x}, '__code__', {x})",
    "NOT_NONE_MATCH": "{x} is None",
    "SEQUENCE_LENGTH": "len({x})",
    "TUPLE_ITERATOR_LEN": "{x}.__length_hint__()",
    **dict.fromkeys(("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), "tuple({x})"),
    **dict.fromkeys(
        ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"), "{a} in {x}"
    ),
    "HASATTR": "has({x}, {a})",
    "NOT_PRESENT_IN_GENERIC_DICT": "{a} in {x}.__dict__",
    "DUPLICATE_INPUT": "{x} is {a}",
    "TENSOR_MATCH": "described({x})",
}

# Not looked at: the call's arguments (memopt's own guard compares them), Dynamo's own wrapper
# around the model, torch's flattening of arguments, and memopt's own code.
_ELSEWHERE = re.compile(
    r"L\['flat_args'\]|L\['self'\](?!\._modules\['_export_root'\])|G\['ExportTracerOutput'\]|"
    r"G\['pytree'\]|G\['__builtins_dict|__import_torch_dot__dynamo|__pytree|_pytree\.|^__import__|"
    r"G\['__import_memopt_"
)
_REGISTERED = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_CELL = re.compile(r"^(.*)\.__closure__\[(\d+)\]\.cell_contents")

# Settings of torch that decide what a trace consists of.
_SETTINGS = (
    *GLOBAL_HOOKS,
    "torch.get_default_dtype()",
    DEFAULT_DEVICE,
    "torch.are_deterministic_algorithms_enabled()",
    "torch.backends.cuda.flash_sdp_enabled()",
    "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()",
)


_ALIAS = "global_"
_MODEL = re.compile(r"\bmodel\b")
_GLOBAL = re.compile(r"\bG\['([^']+)'\]")
# Dynamo copies the dictionaries of classes before it reads them.
_COPIED = re.compile(r"\bdict\(((?:[^()]|\([^()]*\))*\.__dict__)\)")
_NAMED = re.compile(r"\.__dict__\['(\w+)'\]")


def read(expression: str, model: nn.Module, names: dict[str, Any]) -> Any:
    """Evaluate an expression over the model."""
    return eval(expression, {**names, "model": model})


class TraceReader:
    """Reads the present values that one trace's guards are about.

    Attributes:
        names: values of the names in the dependencies' expressions.
        tensors: expression → the tensor that it read.
    """

    def __init__(self, model: nn.Module, guards: TraceGuards) -> None:
        self._model, self._guards = model, guards
        self._aliases = {name: f"{_ALIAS}{i}" for i, name in enumerate(guards.scope)}
        self.names: dict[str, Any] = {**guards.names, "torch": torch}
        self.names |= {"described": described, "has": has}
        self.names |= {self._aliases[name]: value for name, value in guards.scope.items()}
        self._registered = {id(one) for one in (*model.parameters(), *model.buffers())}
        self._root = getattr(type(model), "in_messages", "model")
        self.tensors: dict[str, torch.Tensor] = {}
        places = (place for change in guards.changes for place in change.places)
        self._changed = (*places, "\0")

    def dependencies(self) -> list[Dependency]:
        """Return everything that was read, also values that the forward changes and changes back,
        as it may compute with the old ones. A dependency comes after those on the way to it."""
        relevant = [
            guard
            for guard in sorted(self._guards.guards, key=lambda one: len(one.name))
            if guard.name and not _ELSEWHERE.search(guard.name)
        ]
        found = [dependency for guard in relevant if (dependency := self._watch(guard)) is not None]
        found += [*self._methods(found), *self._aliased(), *self._settings()]
        if torch.__version__.startswith(_UNGUARDED):
            found += [more for one in found for more in self._defaults(one)]
        return list({dependency.look: dependency for dependency in reversed(found)}.values())[::-1]

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return the forward's changes to objects that existed before it."""
        return self._guards.changes

    def takes_for_constant(self, change: Change) -> bool:
        """Return whether the trace read a number where the forward sets another."""
        read = (one.name for one in self._guards.guards if change.in_its_place(one.name))
        return any(type(self._read(self._expression(one))) in (int, float) for one in read)

    def made_of_their_last(self) -> list[Change]:
        """Return the changes of numbers to others that tensors' numbers and the old ones make."""
        return [c for c in self.changes if Number() in c.values and self.takes_for_constant(c)]

    def read_later(self, source: str) -> Callable[..., Any]:
        """Return a function that reads one of Dynamo's expressions, given the model (and
        others)."""
        look = f"lambda model, *_: {self._expression(source)}"
        reads: Callable[..., Any] = eval(look, dict(self.names))
        return reads

    def shown(self, source: str) -> str:
        """Return one of Dynamo's expressions as a text for people."""
        text = self._shown(self._expression(source).removesuffix(".cell_contents"))
        return text or self._root

    def unregistered(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return the tensors that the model does not register, and the expressions that read
        them."""
        found = self.tensors.items()
        return tuple((s, t) for s, t in found if id(t) not in self._registered)

    def _watch(self, guard: DynamoGuard) -> Dependency | None:
        """Return the dependency that stands for a guard; None if the value cannot change, or
        another dependency covers it."""
        source = self._expression(guard.name)
        template = _LOOKS.get(guard.kind, "type({x})")
        if HOOKS.search(source):
            template = "tuple({x}.values())"
        detail = repr(guard.detail)
        if guard.kind == "DUPLICATE_INPUT":
            if not _MODEL.search(source) or _ELSEWHERE.search(guard.detail):
                return None
            detail = self._expression(guard.detail)
        elif "{a}" in template and not isinstance(guard.detail, (str, int)):
            detail = self._bound(guard.detail)
        identity = guard.kind in _IDENTITY
        look = template.format(x=source, a=detail)
        try:
            value = self._read(source)
            if guard.kind == "TENSOR_MATCH":
                value = self._guards.numbers.get(guard.name, value)
                self.tensors[source] = value
                if id(value) in self._registered:
                    return None
            if identity and self._read(source) is not value:
                # Each look makes a new object, such as a bound method.
                identity, look = False, f"type({source})"
            if guard.kind == "SEQUENCE_LENGTH" and isinstance(value, tuple):
                look = f"tuple.__len__({source})"  # a class's own may refuse (e3nn's Irrep)
            planned = self._value_of(look, source, value)
        except UNREADABLE:
            return None
        if type(planned) in (list, set, dict):
            planned = type(planned)(planned)
        shown = self._shown(source)
        shared = not _MODEL.search(look) or guard.name.startswith(self._changed)
        if guard.kind == "DUPLICATE_INPUT":
            shown += f" and {self._shown(detail)}"
        return Dependency(shown, source, look, planned, identity, shared)

    def _settings(self) -> Iterator[Dependency]:
        for setting in _SETTINGS:
            source = setting.removeprefix("tuple(").removesuffix(".values())")
            yield Dependency(source, source, setting, self._read(setting))

    def _methods(self, dependencies: list[Dependency]) -> Iterator[Dependency]:
        """Yield dependencies on traced functions of the read values' classes, which may be
        replaced, also on inherited ones, which the class may override later."""
        classes = {one.planned for one in dependencies if one.look == f"type({one.source})"}
        owners = {base for one in classes for base in one.__mro__ if base is not object}
        for owner in sorted(owners, key=lambda one: one.__qualname__):
            for name, value in list(vars(owner).items()):
                if owner is torch.nn.Module and name in _DYNAMOS_OWN:
                    continue
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if getattr(function, "__code__", None) in self._guards.code:
                    source = f"{self._bound(owner)}.__dict__[{name!r}]"
                    shown = f"{owner.__qualname__}.{name}"
                    yield Dependency(shown, source, source, value, identity=True)
                    called = name == "__call__" or owner is not torch.nn.Module
                    if called and isinstance(value, types.FunctionType | property):
                        heirs = (one for one in classes if owner in one.__mro__)
                        yield from self._inherited(name, value, heirs)

    def _inherited(self, name: str, value: Any, heirs: Iterable[type]) -> Iterator[Dependency]:
        for heir in sorted(heirs, key=lambda one: one.__qualname__):
            if name not in vars(heir) and getattr(heir, name) is value:
                look = f"{self._bound(heir)}.{name}"
                yield Dependency(f"{heir.__qualname__}.{name}", look, look, value, identity=True)

    def _defaults(self, one: Dependency) -> Iterator[Dependency]:
        """Yield a dependency on the default arguments of a function, if one was read."""
        if isinstance(one.planned, types.CodeType):
            place = f"getattr({one.source.removesuffix('.__code__')}, '__defaults__', None)"
            yield Dependency(f"{one.shown}.__defaults__", place, place, self._read(place))

    def _aliased(self) -> Iterator[Dependency]:
        """Yield a dependency for each further place of a tensor that was read in several."""
        first: dict[int, str] = {}
        for source, tensor in self.tensors.items():
            other = first.setdefault(id(tensor), source)
            if other != source:
                shown = f"{self._shown(source)} and {self._shown(other)}"
                yield Dependency(shown, source, f"{source} is {other}", True)

    def _value_of(self, look: str, source: str, value: Any) -> Any:
        """Return the present value of a look's expression. `value` is that of `source`, which the
        commonest looks need not read again."""
        if look == source:
            return value
        return type(value) if look == f"type({source})" else self._read(look)

    def _read(self, expression: str) -> Any:
        return read(expression, self._model, self.names)

    def _bound(self, value: Any) -> str:
        name = f"bound_{id(value)}"
        self.names[name] = value
        return name

    def _expression(self, name: str) -> str:
        text = name.replace(ROOT, "model")
        if "G['" in text:
            text = _GLOBAL.sub(lambda m: self._aliases.get(m[1], "absent"), text)
        return _COPIED.sub(r"\1", text) if "dict(" in text else text

    def _shown(self, source: str) -> str:
        cell = _CELL.match(source) if "cell_contents" in source else None
        if cell is not None and cell[1].count("(") == cell[1].count(")"):
            name = self._read(cell[1]).__code__.co_freevars[int(cell[2])]
            return f"{self._shown(cell[1])}'s {name}{source[cell.end() :]}"
        text = _REGISTERED.sub(r".\1", source)
        text = _NAMED.sub(r".\1", text) if ".__dict__" in text else text
        for alias in self._aliases.values() if _ALIAS in text else ():
            value = self.names[alias]
            if alias in text and isinstance(value, types.ModuleType):
                text = re.sub(rf"\b{alias}\b", value.__name__, text)
        return _MODEL.sub(self._root, text, count=1).lstrip(".")

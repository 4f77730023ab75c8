"""Tracks what a captured graph depends on besides its inputs, and checks it at every call.

A graph holds as constants the Python values that its trace read: attributes of the model, flags of
a configuration, globals, default arguments, a closure's variables, the hooks of a module. Dynamo's
guards name them all. Each becomes one look: an expression, and its value when the graph was
captured. One generated function takes all looks, and reads every object on the way once.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from memopt.step.assumed import assumptions_of
from memopt.step.described import described, same
from memopt.step.dynamo_guards import TraceGuards
from memopt.step.input_values import InputValue
from memopt.step.inputs import Call
from memopt.step.late import is_late, last_name, late_names
from memopt.step.reader import GONE, UNREADABLE, Dependency, TraceReader, read
from memopt.torch_private.tensors import TensorsKnown

EFFECTS = "side_effects"
"""Key under which a traced graph's `meta` has its forward's side effects."""
_ARGUMENT = re.compile(r"L\['flat_args'\]\[(\d+)\]")
_PATH = r"(\w+(?:\.\w+|\[(?:\d+|'[^'\\\[\]]*')\])*)"
_SIMPLE = re.compile(rf"{_PATH}|(\w+)\({_PATH}(\.values\(\))?\)")
"""What nearly all looks are: a path, a function of it, or of its values."""


@dataclass(frozen=True, eq=False)
class Dependencies:
    """All that a captured graph depends on besides its inputs.

    Attributes:
        items: the dependencies; those on the way to others come first.
        names: values of the names in their expressions.
        tensors: the unregistered tensors, each after the expression that reads it.
        late_names: names that the backward itself may read in eager; None: any.
        arguments: the attributes of the call's tensors, other than all tensors have, that were
            read: number of the flat argument, name, and value (`GONE`: it had none).
        values: what the forward reads of the values of the call's tensors.
    """

    items: tuple[Dependency, ...] = ()
    names: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[tuple[str, torch.Tensor], ...] = ()
    late_names: frozenset[str] | None = frozenset()
    arguments: tuple[tuple[int, str, Any], ...] = ()
    values: tuple[InputValue, ...] = ()

    @staticmethod
    def of(model: nn.Module, guards: TraceGuards, call: Call) -> Dependencies:
        """Make dependencies of a trace's guards, with their present values."""
        reader = TraceReader(model, guards)
        dependencies = tuple(reader.dependencies())
        return Dependencies(
            dependencies,
            tuple(reader.names.items()),
            reader.unregistered(),
            late_names(model, guards.code),
            tuple(_of_arguments(guards, call)),
            guards.values,
        )

    def unchanged(self, model: nn.Module) -> bool:
        """Return whether every dependency has its planned value."""
        try:
            return self._all_as_planned(model)
        except UNREADABLE:
            return False

    def changed(self, model: nn.Module) -> tuple[Dependency, Any] | None:
        """Return the first dependency that differs, and its present value; None if none does."""
        names = dict(self.names)
        for dependency in self.items:
            try:
                found = read(dependency.look, model, names)
            except UNREADABLE:
                return dependency, GONE
            if dependency.differs(found):
                return dependency, found
        return None

    def late(self, recomputes: bool) -> Dependencies:
        """Return the dependencies that eager reads in the backward.

        Args:
            recomputes: whether a part of the forward runs again in the backward (checkpoints).
        """
        names = None if recomputes else self.late_names
        items = tuple(one for one in self.items if is_late(one, names))
        return replace(self, items=items, late_names=names)

    def may_read(self, source: str) -> bool:
        """Return whether the backward itself may read what an expression names."""
        return self.late_names is None or last_name(source) in self.late_names

    def source_of(self, tensor: torch.Tensor) -> str:
        """Return the expression that read a tensor which is not registered; "" if none did."""
        return next((source for source, known in self.tensors if known is tensor), "")

    def with_others(self, others: Iterable[Dependency]) -> Dependencies:
        """Return these dependencies and others; where both look at the same thing, this object's
        dependency is kept."""
        every = {dependency.look: dependency for dependency in (*others, *self.items)}
        return replace(self, items=tuple(every.values()))

    def of_copy(self, model: nn.Module, copied: nn.Module) -> Dependencies:
        """Return a deep copy's dependencies: the model's own objects become the copy's."""
        names = dict(self.names)

        def moved(dependency: Dependency) -> Dependency:
            try:
                if not dependency.differs(read(dependency.look, model, names)):
                    return replace(dependency, planned=read(dependency.look, copied, names))
            except UNREADABLE:
                pass
            return dependency

        return replace(self, items=tuple(map(moved, self.items)))

    def reader_of(self, tensor: torch.Tensor) -> Callable[[nn.Module], Any] | None:
        """Return a function that reads an unregistered tensor where the forward does; None if the
        forward makes it itself."""
        for source, known in self.tensors:
            if known is tensor:
                reader: Callable[[nn.Module], Any] = eval(
                    f"lambda model: {source}", dict(self.names)
                )
                return reader
        return None

    @cached_property
    def _all_as_planned(self) -> Callable[[nn.Module], bool]:
        return _generate(self.items, dict(self.names))


def _of_arguments(guards: TraceGuards, call: Call) -> Iterator[tuple[int, str, Any]]:
    """Yield `Dependencies.arguments`."""
    leaves = call.leaves
    for one in guards.guards:
        found = _ARGUMENT.fullmatch(one.name) if one.kind == "HASATTR" else None
        if found is not None and not hasattr(torch.Tensor, str(one.detail)):
            number = int(found[1])
            yield number, str(one.detail), getattr(leaves[number], str(one.detail), GONE)


def digest(traced: GraphModule, model: nn.Module, dependencies: Dependencies) -> str:
    """Return the digest of a model's traced graph: equal digests compute the same."""
    found = hashlib.sha256()
    found.update(str(traced.meta.get(EFFECTS, "")).encode())
    for name, module in traced.named_modules():
        if isinstance(module, GraphModule):
            found.update(f"{name}: {module.graph.python_code('self').src}".encode())
    for value in dependencies.values:
        found.update(f"{value.compute.code} {value.truth} {value.planned}".encode())
    for one in assumptions_of(traced):
        found.update(f"{one.goes} {one.raises} {one.decide and one.decide.code}".encode())
    known = {id(tensor) for _, tensor in dependencies.tensors}
    known |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in (*traced.named_parameters(), *traced.named_buffers()):
        elements = () if id(tensor) in known else tensor.tolist()
        found.update(f"{name} {described(tensor)} {elements}".encode())
    return found.hexdigest()


class _Looks:
    """Writes the source of the function that checks all dependencies, one after the other."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._names = names
        self._tensors: list[str] = []
        self._tests: list[str] = []
        self._known: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def take(self, dependency: Dependency) -> None:
        """Add lines that take one look and return False if it does not find the planned value."""
        planned = f"planned_{len(self._names)}"
        self._names[planned] = dependency.planned
        if simple := _SIMPLE.fullmatch(dependency.look):
            alone, function, of, values = simple.groups()
            path = self._path(alone or of)
            if function == "described" and dependency.planned[0] == "tensor":
                self._take_tensor(path, dependency.planned)
                return
            if function == "tuple" and values and not dependency.planned:
                self._refuse_if(path)
                return
            found = path if alone else f"{function}({path}{values or ''})"
        else:
            found = self.reduced(ast.parse(dependency.look, mode="eval").body)
        if not found.isidentifier():
            self.lines.append(f"    found = {found}")
            found = "found"
        test = f"{found} is not {planned}"
        self._refuse_if(test if dependency.identity else f"{test} and not same({found}, {planned})")

    def _take_tensor(self, tensor: str, planned: tuple[Any, ...]) -> None:
        _, shape, stride, dtype, device, requires_grad = planned
        at = f"device_{len(self._names)}"
        self._names[at] = device
        self._tensors.append(tensor)
        self._tests.append(
            f"{tensor}.requires_grad is not {requires_grad} or {tensor}.dtype is not {dtype} or "
            f"{tensor}.shape != {shape} or {tensor}.stride() != {stride} or {tensor}.device != {at}"
        )

    def end(self) -> None:
        """Add the lines that check tensors: all of them together first, and one by one if some may
        differ."""
        if self._tensors:
            self._names["tensors_known"] = TensorsKnown()
            self.lines.append(f"    tensors = ({', '.join(self._tensors)},)")
            self.lines.append("    if tensors_known(tensors): return True")
            for test in self._tests:
                self._refuse_if(test)
            self.lines.append("    tensors_known.learn(tensors)")
        self.lines.append("    return True")

    def _refuse_if(self, test: str) -> None:
        self.lines.append(f"    if {test}: return False")

    def _path(self, text: str) -> str:
        """Reduce a path to a variable that holds what it reads."""
        if text not in self._paths:
            at = text.rfind("[" if text[-1] == "]" else ".")
            self._paths[text] = (
                text if at < 0 else self._variable(f"{self._path(text[:at])}{text[at:]}")
            )
        return self._paths[text]

    def reduced(self, node: ast.expr) -> str:
        """Reduce an expression to variables that hold what it reads."""
        match node:
            case ast.Attribute():
                return self._variable(f"{self.reduced(node.value)}.{node.attr}")
            case ast.Subscript(slice=ast.Constant()):
                return self._variable(f"{self.reduced(node.value)}[{ast.unparse(node.slice)}]")
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                return f"{name}({', '.join(map(self.reduced, node.args))})"
            case ast.Set():
                return f"{{{', '.join(map(self.reduced, node.elts))}}}"
            case ast.Compare(ops=[ast.Is() | ast.In()]):
                word = "is" if isinstance(node.ops[0], ast.Is) else "in"
                return f"({self.reduced(node.left)} {word} {self.reduced(node.comparators[0])})"
            case _:
                return ast.unparse(node)

    def _variable(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = f"v{len(self._known)}"
            self.lines.append(f"    {self._known[text]} = {text}")
        return self._known[text]


def _generate(
    dependencies: tuple[Dependency, ...], names: dict[str, Any]
) -> Callable[[nn.Module], bool]:
    """Generate one function that takes all looks and reads every object on the way once."""
    names["same"] = same
    looks = _Looks(names)
    for dependency in dependencies:
        looks.take(dependency)
    looks.end()
    source = "\n".join(["def look(model):", *looks.lines])
    exec(compile(source, "<memopt dependencies>", "exec"), names)
    look: Callable[[nn.Module], bool] = names["look"]
    return look

"""A captured model: its joint graph, and the callable that runs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.step.assumed import Assumption, Odds, check_assumed, values_of
from memopt.step.dependencies import Dependencies
from memopt.step.inputs import Call
from memopt.step.joint_graph import (
    Boxed,
)
from memopt.step.model_outputs import NO_OUTPUTS, TracedOutputs
from memopt.step.side_effects import NO_EFFECTS, SideEffects
from memopt.torch_private.modules import buffers_of, modules_of, parameters_of
from memopt.torch_private.tensors import SHARD


@dataclass(frozen=True)
class Primal:
    """An input of the joint graph, and where its value comes from at run time.

    Attributes:
        node: the placeholder.
        kind: "parameter", "buffer" or "input".
        name: fully qualified name of a parameter or buffer of the user's model; "" for a tensor
            that the model holds without registering it.
        index: position among the flat call arguments, for inputs.
        constant: the tensor itself, when the model does not register it.
        reader: reads an unregistered tensor where the forward does; None if the forward makes it.
        part: which part of a DTensor it is ("_local_tensor", "device_mesh"); "": no DTensor.
    """

    node: Node
    kind: str
    name: str
    index: int | None = None
    constant: torch.Tensor | None = None
    reader: Callable[[nn.Module], Any] | None = None
    part: str = ""

    @property
    def held(self) -> bool:
        """Return whether the model holds it and `Captured.compiled` takes its `value`. Of a
        DTensor's parts, the first stands for the whole."""
        return self.kind != "input" and self.part in ("", SHARD)

    def value(self, model: nn.Module, leaves: Sequence[Any]) -> Any:
        """Return its value at run time, from the model and the call's flat arguments; for a part of
        a DTensor, the whole DTensor."""
        if self.index is not None:
            return leaves[self.index]
        if self.reader is not None:
            return self.reader(model)
        if self.constant is not None:
            return self.constant
        return registered(model, self.name)


class PrimalReader:
    """Reads the values of many primals, every module on the way to them once.

    Args:
        primals: in the order in which their values are given.
    """

    def __init__(self, primals: Sequence[Primal]) -> None:
        self._count = len(primals)
        self._on_the_way: list[tuple[int, str]] = []
        """(number of a module, the name of its child, which gets the next number)."""
        self._registered: list[tuple[int, int, str]] = []
        """(position, number of the module, name in it)."""
        self._others: list[tuple[int, Primal]] = []
        numbers = {"": 0}
        for position, primal in enumerate(primals):
            if primal.index is not None or primal.reader is not None or primal.constant is not None:
                self._others.append((position, primal))
                continue
            path, _, last = primal.name.rpartition(".")
            self._registered.append((position, self._number(path, numbers), last))

    def _number(self, path: str, numbers: dict[str, int]) -> int:
        if path not in numbers:
            before, _, name = path.rpartition(".")
            parent = self._number(before, numbers)
            self._on_the_way.append((parent, name))
            numbers[path] = len(numbers)
        return numbers[path]

    def __call__(self, model: nn.Module, leaves: Sequence[Any]) -> list[Any]:
        """Return `Primal.value` of each primal."""
        modules = [model]
        for parent, name in self._on_the_way:
            modules.append(modules_of(modules[parent])[name])
        registries = [(parameters_of(module), buffers_of(module)) for module in modules]
        values: list[Any] = [None] * self._count
        for position, number, name in self._registered:
            parameters, buffers = registries[number]
            values[position] = parameters[name] if name in parameters else buffers[name]
        for position, primal in self._others:
            values[position] = primal.value(model, leaves)
        return values


@dataclass(eq=False)
class Hooks:
    """The functions that the compiled callable runs. The executor's runtime, `owner`, sets them.
    `tangents` are the layouts in which AOTAutograd hands gradients over (`aot.of_any_size`)."""

    forward: Boxed | None = None
    backward: Boxed | None = None
    owner: object = None
    tangents: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Captured:
    """A captured model: its joint graph, and the callable that AOTAutograd made around it.

    Attributes:
        module: the joint graph, functional ATen operators only.
        primals: the joint graph's inputs, in order.
        tangents: placeholders of the outputs' gradients.
        forward_outputs: results of the forward part (nodes or constants); the first
            `len(mutated)` are new values of mutated inputs.
        gradients: results of the backward part, one per primal (None: no gradient).
        given: positions of the gradients that `compiled` takes from the backward, see `Split`.
        mutated: for each leading forward output, the index of the primal it updates.
        call: the example call that was captured.
        device: where the kernels run; None: nothing is computed (an estimate).
        dependencies: what the trace read besides the inputs, and relied on.
        trace: the digest of the forward's graph, as it was traced.
        compiled: `compiled(*parameters, *buffers, *args, **kwargs) -> output`; runs `hooks`.
        hooks: the forward and backward callables behind `compiled`.
        model: weak reference to the user's model.
        outputs: facts about the leaves of the output.
        other_results: results of the backward part besides gradients (whole steps).
        effects: the forward's side effects. If the graph returns values for them, `compiled`
            returns a pair of the model's output and these values.
        assumed: how branches on values are assumed to go. If there are some, `compiled` returns a
            pair: what it would return else, and the values that decide them.
        odds: how often they go so.
        looked: what its trace was told of values, see `Call.looked`.
    """

    module: GraphModule
    primals: tuple[Primal, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    given: tuple[int, ...]
    mutated: tuple[int, ...]
    call: Call
    compiled: Callable[..., Any]
    hooks: Hooks
    model: weakref.ReferenceType[nn.Module]
    device: torch.device | None = None
    dependencies: Dependencies = field(default_factory=Dependencies)
    trace: str = ""
    outputs: TracedOutputs = NO_OUTPUTS
    other_results: tuple[Any, ...] = ()
    effects: SideEffects = NO_EFFECTS
    assumed: tuple[Assumption, ...] = ()
    odds: Odds = field(default_factory=Odds)
    looked: tuple[Any, ...] = ()

    @property
    def leaves(self) -> tuple[int | None, ...]:
        """Return each forward output's position among the model's output leaves; None: no leaf."""
        mutated = len(self.mutated)
        return tuple(
            i - mutated if mutated <= i < mutated + self.outputs.count else None
            for i in range(len(self.forward_outputs))
        )

    def check_assumed(self, outputs: Sequence[Any]) -> None:
        """Check the values in a call's forward outputs that decide its branches.

        Raises:
            AssumptionError: a branch does not go as assumed.
        """
        if not self.assumed:
            return
        earlier, count = dict(self.outputs.repeated), self.outputs.count
        places = (earlier.get(i, i) for i in range(count - values_of(self.assumed), count))
        check_assumed(self.assumed, [outputs[len(self.mutated) + place] for place in places])

    def example(self, given: Call | None = None) -> Call:
        """Return the example call, with zeros, or a given call's tensors, in place of those that it
        has freed (`Call.filled`)."""
        return replace(self.call.filled(given), looked=self.looked)

    @cached_property
    def held_values(self) -> PrimalReader:
        """Return a function that reads the values of all held primals, in their order."""
        return PrimalReader([primal for primal in self.primals if primal.held])

    @cached_property
    def values(self) -> PrimalReader:
        """Return a function that reads the values of all primals."""
        return PrimalReader(self.primals)

    def sets(self, primal: Primal) -> bool:
        """Return whether the forward replaces a parameter or buffer (`self.mean = ...`)."""
        return primal.held and f"model.{primal.name}" in self.effects.shown


def registered(model: nn.Module, name: str) -> Any:
    """Return a registered parameter or buffer by its name. An attribute of that name may be
    something else made of it (a sharded parameter, gathered)."""
    path, _, last = name.rpartition(".")
    owner = attrgetter(path)(model) if path else model
    registry = parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)
    return registry[last]

"""Backwards that begin at some of the outputs: a loss that uses one of two heads, or a model's own
loss and not the logits beside it.

Autograd computes nothing for an output without a gradient, and parameters that only such outputs
reach get None, which an optimizer skips. A planned backward is for all outputs; for fewer, it skips
the kernels that only the others need. Their results are tensors of one number, so that memory is as
planned. The number is -0.0 where autograd adds the gradients of a value's uses (adding it changes
no bit) and zero where autograd itself makes zeros of a missing gradient. If another operator reads
both kinds, autograd's result is not known, and the unplanned model runs again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from memopt.executor.absence import NEUTRAL, Like, Uncomputed
from memopt.executor.arriving_layouts import rounds_otherwise
from memopt.executor.handover import Handed, Handover, Yielding
from memopt.executor.pipeline_stages import PIPELINES
from memopt.executor.values import copied
from memopt.programs.instructions import Program
from memopt.step.backend import autocast_off
from memopt.step.build import Lowering
from memopt.step.captured import Captured, Primal
from memopt.step.kernel import FusedKernel
from memopt.step.memory_layout import same_strides
from memopt.step.nodes import is_random
from memopt.torch_private.modes import keeps_graph, wanted_inputs
from memopt.torch_private.operators import aten

Backward: TypeAlias = Callable[[list[Any], list[Any], list[Any]], tuple[Any, ...]]
"""See `memopt.executor.runtime.Installed.backward`."""

_ADD = torch.ops.aten.add.Tensor
_GIVEN_ZEROS = frozenset(
    (
        torch.ops.aten.cat.default,
        torch.ops.aten.stack.default,
        torch.ops.aten.mkldnn_rnn_layer_backward.default,
    )
)
"""The backwards of `split`, `unbind` and an LSTM: autograd makes zeros of what they miss, laid out
row by row."""
_ROWS: Any = {"memory_format": torch.contiguous_format, "device": "meta"}
_SIGNED = frozenset((aten._conj.default, aten._neg_view.default))
"""Views that read -0.0 as 0.0."""


@dataclass(frozen=True)
class PartialBackward:
    """A program's backward for some of the outputs.

    Attributes:
        numbers: for each tangent the number that fills it if it is missing.
        run: the backward; None: the program's own, given filled tangents.
        in_halves: the same in two halves: it yields the gradients of inputs, then all others. None:
            it runs whole, or `run` is None.
    """

    numbers: tuple[float, ...]
    run: Backward | None = None
    in_halves: Yielding | None = None

    def complete(self, args: list[Any], tangents: Sequence[Node]) -> None:
        """Fill the places of missing tangents, behind the first argument, with its numbers."""
        for i, (tangent, number) in enumerate(zip(tangents, self.numbers, strict=True), 1):
            if args[i] is None:
                args[i] = Like.of(tangent.meta["val"], number).made()


Partial: TypeAlias = Callable[[frozenset[int]], PartialBackward | None]
"""(positions of the missing tangents) → the backward without them; None: autograd's result is not
known."""


def unknown(_missing: frozenset[int]) -> PartialBackward | None:
    """Return None: no backward without some tangents is known."""
    return None


def partial_backward(
    captured: Captured,
    lowering: Lowering,
    program: Program,
    missing: frozenset[int],
    make: Callable[[Uncomputed], tuple[Backward, Yielding | None]],
) -> PartialBackward | None:
    """Return a program's backward without some tangents; None: autograd's result is not known."""
    absence = absence_of(captured, lowering, missing)
    if absence is None or _is_replaced(lowering, program, absence):
        return None
    tangents = captured.tangents
    numbers = tuple(absence.number(lowering.storages[tangent][0]) for tangent in tangents)
    idle = not absence.nodes.isdisjoint(captured.gradients)
    idle = idle or any(node in absence.nodes for node in lowering.nodes)
    if idle and captured.outputs.makes_zeros:
        return None
    return PartialBackward(numbers, *make(absence)) if idle else PartialBackward(numbers)


def absence_of(
    captured: Captured, lowering: Lowering, missing: frozenset[int]
) -> Uncomputed | None:
    """Return the part of the backward to skip without some tangents; None: it is not known."""
    walk = _Walk({tangent: i in missing for i, tangent in enumerate(captured.tangents)})
    for node in captured.module.graph.nodes:
        if node.op == "call_function" and node in lowering.storages and not walk.takes(node):
            return None
    fills: dict[int, float] = {}
    for node, number in walk.numbers.items():
        for tensor in lowering.storages[node]:
            if tensor is not None and str(fills.setdefault(tensor, number)) != str(number):
                return None
    nodes = frozenset(node for node, absent in walk.absent.items() if absent)
    pairs = zip(lowering.nodes, lowering.graph.operators, strict=True)
    # Skipping a collective would need the other ranks to skip it, too.
    if any(operator.collective is not None and node in nodes for node, operator in pairs):
        return None
    return Uncomputed(nodes, fills)


def _is_replaced(lowering: Lowering, program: Program, absence: Uncomputed) -> bool:
    """Return whether an alternative implementation reads both skipped and computed values."""
    return any(
        run.implementation is not None
        and lowering.nodes[run.op] not in absence.nodes
        and not absence.nodes.isdisjoint(lowering.nodes[run.op].all_input_nodes)
        for _, run in program.computes
    )


@dataclass
class _Walk:
    """Finds the skipped nodes of a graph, node by node.

    Attributes:
        absent: for each node that depends on tangents, whether all of these are missing.
        numbers: skipped node that others read → the number that fills its result.
    """

    absent: dict[Node, bool]
    numbers: dict[Node, float] = field(default_factory=dict)

    def takes(self, node: Node) -> bool:
        """Take the next node; return False if autograd's result for it is not known."""
        states = {one: self.absent[one] for one in node.all_input_nodes if one in self.absent}
        if not states:
            return True
        missing = [one for one, absent in states.items() if absent]
        self.absent[node] = len(missing) == len(states)
        if self.absent[node]:
            return not is_random(node) and node.target not in _SIGNED
        if not missing:
            return True
        if node.target in _GIVEN_ZEROS:
            rows = {one: torch.empty_like(one.meta["val"], **_ROWS) for one in missing}
            return not rounds_otherwise(node, rows) and self._fill(missing, 0.0)
        if isinstance(node.target, FusedKernel):
            added = self._only_added(node.target, node)
        else:
            added = _is_sum(node, missing[0])
        return added and self._fill(missing, NEUTRAL)

    def _fill(self, nodes: Iterable[Node], number: float) -> bool:
        """Note a number for nodes; return False if a node has another one (the other zero)."""
        return all(str(self.numbers.setdefault(node, number)) == str(number) for node in nodes)

    def _only_added(self, kernel: FusedKernel, call: Node) -> bool:
        """Return whether a compiled region only adds its missing inputs."""
        if kernel.graph is None:
            return False
        placeholders = kernel.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, call.args, strict=True)
        given = {inner: one for inner, one in pairs if isinstance(one, Node)}
        walk = _Walk({i: self.absent[one] for i, one in given.items() if one in self.absent})
        for node in kernel.graph.nodes:
            if node.op == "call_function":
                known = walk.takes(node)
                computed = walk.absent.get(node, False) and not _keeps_neutral(node)
                if not known or computed:
                    return False
        results = kernel.graph.output_node().all_input_nodes
        return all(str(number) == str(NEUTRAL) for number in walk.numbers.values()) and not any(
            walk.absent.get(result, False) for result in results
        )


def _keeps_neutral(node: Node) -> bool:
    """Return whether a node maps -0.0 to -0.0 only: a view, or a sum."""
    is_sum = node.target is _ADD and not node.kwargs and len(node.all_input_nodes) == len(node.args)
    return is_sum or getattr(node.target, "is_view", False)


def _is_sum(node: Node, missing: Node) -> bool:
    """Return whether a node adds a missing gradient to another one, and has that one's layout."""
    if node.target is not _ADD or node.kwargs or len(node.args) != 2:
        return False
    other: Any = node.args[1] if node.args[0] is missing else node.args[0]
    if not isinstance(other, Node):
        return False
    whole, one, added = (n.meta["val"] for n in (node, other, missing))
    alike = whole.shape == one.shape == added.shape and whole.dtype == one.dtype == added.dtype
    return alike and same_strides(whole, one.stride())


@dataclass
class FirstHalf:
    """The first half of a call's backward, as the zero-bubble schedules of pipelines run it.

    `torch.distributed.pipelining` asks for the gradients of a stage's inputs first, and keeps the
    graph; later, from the same gradients of its outputs, for those of its parameters. Autograd
    computes for each what it needs. A planned backward is one function, and would run twice. It
    runs once, and stops where the gradients of the inputs are complete
    (`memopt.programs.first_half`); it keeps what it still needs, and drops all else.

    Attributes:
        primals: the joint graph's inputs.
        tangents: the gradients of its outputs, as autograd gave them.
        rest: the second half, once the first has run.
    """

    primals: Sequence[Primal]
    tangents: list[Any]
    rest: Iterator[Handed] = field(default_factory=lambda: iter(()))

    @staticmethod
    def running(
        primals: Sequence[Primal], tangents: list[Any], handover: Handover | None
    ) -> FirstHalf | None:
        """Return the first half if it runs now: in a backward that keeps its graph and is asked for
        no parameter's gradient, where there may be pipelines. None for any other backward, and for
        one that hands its gradients over in parts."""
        if handover or not keeps_graph() or PIPELINES not in sys.modules:
            return None
        wanted = wanted_inputs()
        if not wanted or any(primals[i].held for i in wanted):
            return None
        return FirstHalf(primals, tangents)

    def first(self, whole: Backward, in_halves: Yielding | None) -> Backward:
        """Return a function that runs the first half of a backward, and returns the gradients of
        inputs, by position. If there is none in halves, it runs the whole one."""

        def run(*arguments: list[Any]) -> tuple[Any, ...]:
            self.rest = (in_halves or self._at_once(whole))(*arguments)
            return self._by_position(dict(next(self.rest, ())))

        return run

    def second(self, tangents: list[Any]) -> tuple[Any, ...] | None:
        """Run the second half; return the gradients of parameters, by position. None: the backward
        that runs now is no second half, since it asks for other gradients, or begins with
        others."""
        if not all(self.primals[i].held for i in wanted_inputs()):
            return None
        if not all(map(_is_equal, self.tangents, tangents)):
            return None
        with autocast_off():
            found = [one for handed in self.rest for one in handed]
        # Whoever gets gradients may update them: those of the next time are others.
        again = [tuple((i, copied(one)) for i, one in found)] if keeps_graph() else ()
        self.rest = iter(again)
        return self._by_position(dict(found))

    def _at_once(self, whole: Backward) -> Yielding:
        def running(*arguments: list[Any]) -> Iterator[Handed]:
            found = dict(enumerate(whole(*arguments)[: len(self.primals)]))
            first = [i for i, primal in enumerate(self.primals) if not primal.held]
            yield tuple((i, found.pop(i)) for i in first)
            yield tuple(found.items())

        return running

    def _by_position(self, found: Mapping[int, Any]) -> tuple[Any, ...]:
        return tuple(found.get(i) for i in range(len(self.primals)))


def _is_equal(before: Any, now: Any) -> bool:
    if before is now or before is None or now is None:
        return before is now
    return before.shape == now.shape and torch.equal(before, now)

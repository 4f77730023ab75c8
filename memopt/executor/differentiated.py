"""Backwards that are differentiated themselves (`create_graph=True`): gradient penalties, products
with a Hessian.

A planned backward has no derivative. In its place the unplanned model runs again, as its forward
ran, and the backward of that, which has one, gives the gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from memopt.errors import ExecutionError, GuardError
from memopt.executor.guard import Guard
from memopt.executor.random_state import RandomStates
from memopt.executor.unplanned import unplanned
from memopt.profiler.backend import autocast_as, autocast_off, autocast_state
from memopt.profiler.capture import Captured
from memopt.profiler.inputs import Call
from memopt.profiler.nodes import is_random
from memopt.profiler.own_backward import gradient_hooks_off
from memopt.profiler.restored_state import state_restored

_STATISTICS = ("running_mean", "running_var")
_WHY = (
    "the backward of a planned call is differentiated itself (create_graph=True), and its forward "
    "cannot run again for that"
)


def differentiable_through(output: Any) -> None:
    """Let AOTAutograd's function behind a planned output return gradients that have a backward, if
    they have one. It refuses a second derivative, and torch 2.11 forgets to."""
    nodes = [v.grad_fn for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]
    while nodes:
        node: Any = nodes.pop()
        function: Any = getattr(type(node), "_forward_cls", None)
        if hasattr(function, "_double_backward"):
            function._double_backward = staticmethod(_as_computed)
            return
        nodes += [one for one, _ in getattr(node, "next_functions", ())]


def _as_computed(_context: Any, compute: Any, _arguments: Any) -> Any:
    return compute()


class AsOriginal:
    """One planned call, to run again without a plan.

    Args:
        captured: the captured model.
        model: the user's.
        call: the call, before it runs.
        guard: looks whether the call is still the planned one.
        random: of the device where it draws random numbers; None: it draws none.
        used: told before the call runs again.
    """

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        call: Call,
        guard: Guard,
        random: RandomStates | None,
        used: Callable[[], None],
    ) -> None:
        self._captured, self._model, self._call, self._guard = captured, model, call, guard
        self._autocast, self._used = autocast_state(), used
        self._random = random
        self._replay = [] if random is None else random.replay_from_now()

    def gradients(self, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients of the joint graph's inputs, with a backward of their own.

        Args:
            tangents: the gradients of its outputs, in the joint graph's order.

        Raises:
            ExecutionError: the forward cannot run again as it ran.
        """
        run = self._gradients if self._random is None else self._random.settling(self._gradients)
        found: tuple[Any, ...] = run(tangents)
        return found

    def _gradients(self, tangents: list[Any]) -> tuple[Any, ...]:
        captured, model, call = self._captured, self._model, self._call
        written = next(_read_and_written(captured), None)
        if written is not None:
            raise ExecutionError(
                f"{_WHY}: it has updated {written}, which it reads. Train that model without a "
                "plan (memopt.unwrap(model), or planned.original)"
            )
        wanted = [i for i, gradient in enumerate(captured.gradients) if gradient is not None]
        # The hooks of the user's tensors run when these gradients come to them, not here too.
        inner = _aliased(call)
        primals = [captured.primals[i].value(model, inner.leaves) for i in wanted]
        with ExitStack() as stack:
            stack.enter_context(state_restored(model, call))
            stack.enter_context(unplanned())
            for one in self._replay:
                stack.enter_context(one)
            stack.enter_context(autocast_as(self._autocast))
            try:
                self._guard.check(model, call)
            except GuardError as error:
                raise ExecutionError(f"{_WHY} as it ran: {error}") from error
            self._used()
            output = model(*inner.args, **inner.kwargs)
        found = pytree.tree_leaves(output)
        if any(_leaf_of(one) >= len(found) for one in captured.tangents):
            raise ExecutionError(
                f"{_WHY}: a gradient comes from {', '.join(captured.effects.shown)}, where it "
                "leaves tensors behind. Train that model without a plan (memopt.unwrap(model), or "
                "planned.original)"
            )
        pairs = [
            (found[_leaf_of(placeholder)], tangent)
            for placeholder, tangent in zip(captured.tangents, tangents, strict=True)
            if tangent is not None
        ]
        with autocast_off(), gradient_hooks_off(primals):
            gradients = torch.autograd.grad(
                [output for output, _ in pairs],
                primals,
                [tangent for _, tangent in pairs],
                create_graph=True,
                allow_unused=True,
            )
        by_position = dict(zip(wanted, gradients, strict=True))
        return tuple(by_position.get(i) for i in range(len(captured.gradients)))


def _aliased(call: Call) -> Call:
    """The call with aliases of its computed tensors, which have no hooks."""
    made: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else made.setdefault(id(tensor), tensor.view_as(tensor))

    return call.with_tensors(one)


def draws(captured: Captured) -> bool:
    """Whether a captured model draws random numbers."""
    return any(is_random(node) for node in captured.module.graph.nodes)


def pattern(call: Call) -> tuple[bool, ...]:
    """Which arguments of a call are leaves that want a gradient: what a gradient penalty is called
    with, and other calls are not."""
    return tuple(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        for leaf in call.leaves
    )


def _leaf_of(tangent: Node) -> int:
    """Which leaf of the output a tangent is the gradient of."""
    output: Any = getattr(tangent.meta["desc"], "output", None)
    index = getattr(output, "idx", None)
    if index is None:
        raise ExecutionError(
            f"{_WHY}: a gradient of {output!r} is asked for. Train that model without a plan "
            "(memopt.unwrap(model), or planned.original)"
        )
    return int(index)


def _read_and_written(captured: Captured) -> Iterator[str]:
    """Names of what the forward updates in place and reads itself: running again, it would read
    what it wrote. Statistics of a batch norm in training are not read."""
    results = (*captured.forward_outputs[len(captured.mutated) :], *captured.gradients)
    wanted = {node for node in results if isinstance(node, Node)}
    for position in captured.mutated:
        primal = captured.primals[position]
        seen: set[Node] = set()
        waiting = [primal.node]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [user for user in node.users if not _only_updates(node, user)]
        if seen & wanted:
            yield primal.name


def _only_updates(value: Node, user: Node) -> bool:
    """Whether an operator reads a value as statistics that it only updates."""
    schema = getattr(user.target, "_schema", None)
    if schema is None or "batch_norm" not in schema.name or user.target is operator.getitem:
        return False
    named = zip(schema.arguments, user.args, strict=False)
    readers = [one.name for one, given in named if given is value]
    return bool(readers) and all(name in _STATISTICS for name in readers)

"""Runs the unplanned model again, as its forward ran, in place of a planned backward.

Two kinds of backward need it. One that is differentiated itself (`create_graph=True`: gradient
penalties, products with a Hessian), since a planned backward has no derivative. And one that begins
at some of the outputs, where autograd does more than skip what only the others need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Node

from memopt.errors import ExecutionError, GuardError
from memopt.executor.guard import Guard
from memopt.executor.hooked_outputs import INNER, REMEDY, InnerOutputs, gradients_of
from memopt.executor.random_state import RandomStates
from memopt.executor.tensors_again import apart, replaced_since
from memopt.executor.unplanned import unplanned
from memopt.step.backend import autocast_as, autocast_state
from memopt.step.captured import Captured
from memopt.step.inputs import Call, Orders
from memopt.step.nodes import is_random
from memopt.torch_private import pytree
from memopt.torch_private.engine_hooks import engine_off
from memopt.torch_private.modes import is_batch
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.user_code.own_backward import holding
from memopt.user_code.restored_state import state_restored

_STATISTICS = ("running_mean", "running_var")
DIFFERENTIATED = (
    "the backward of a planned call is differentiated itself (create_graph=True: a gradient "
    "penalty, a product with a Hessian)"
)
PARTIAL = (
    "the backward of a planned call begins at some of its outputs only, and what autograd makes of "
    "the others' missing gradients is not in the plan"
)
OTHER_LOSS = (
    "what a planned call is trained with is not the `loss` in its output, for which a call with "
    "`labels` (or `return_loss`) is planned, or uses other outputs than so far"
)
OPENED = "From the next step on {} runs as it is, and its sub-modules are planned where they can be"
OTHER_OUTPUTS = (
    "the loss uses outputs of {} that it did not use before, and for which it is planned from the "
    "next step on"
)
HALVED = (
    "a second backward of a planned call, after one for its inputs alone (the first half of a "
    "pipeline's split backward), begins with other gradients, or asks for others"
)
IN_OTHER_ORDER = (
    "the gradient of an output of a planned call arrives in another memory layout than it was "
    "planned for, in which kernels round otherwise"
)
BATCHED = (
    "gradients of a planned call are computed for a batch of backwards at once "
    "(is_grads_batched=True), and its backward is planned for one"
)
REMEDIES = {
    INNER: REMEDY,
    IN_OTHER_ORDER: "return the output contiguous (output.contiguous()), or name the loss that you "
    "train with (loss_fn= of memopt.wrap)",
    OTHER_LOSS: "name the loss that you train with (loss_fn= of memopt.wrap)",
    DIFFERENTIATED: "train it without a plan (memopt.unwrap(model), or planned.original)",
    BATCHED: "call backward for one of them after the other, or train it without a plan "
    "(memopt.unwrap(model), or planned.original)",
    HALVED: "train it without a plan (memopt.unwrap(model), or planned.original)",
    PARTIAL: "name the loss that you train with (loss_fn=) and detach what the forward leaves in "
    "attributes, or train without a plan (memopt.unwrap(model), or planned.original)",
}
"""Why the unplanned model runs in place of a planned backward → what to do if it cannot."""


Again: TypeAlias = Callable[[Call], nn.Module | None]
"""Returns the module for a call that runs once more in a backward; None: the unplanned one."""
OtherLoss: TypeAlias = Callable[[Call, frozenset[int], int], nn.Module | None]
"""(a call, the positions of its output's leaves that have got gradients, the bytes of these) → the
model under a plan for a loss that uses these leaves; None: none can be made now."""
OtherOrder: TypeAlias = Callable[[Orders, int], Again | None]
"""Given in which orders gradients arrive, and their bytes, returns what runs a call planned for
that; None: they are to be copied."""


class AsOriginal:
    """One planned call, which can run again without a plan.

    Args:
        captured: the captured model.
        model: the user's model.
        held: what it holds in this call, as of `Captured.held_values`.
        call: the call, before it runs.
        guard: checks whether the call is still the planned one.
        random: random states of the device; None: the call draws no random numbers.
        used: called before the call runs again, with the reason and whether a plan runs it.
        other_order: returns a function that runs the call under a plan for gradients in other
            layouts (`OtherOrder`).
        fewer_outputs: returns the module that runs the call under a plan for a loss of fewer
            outputs (`OtherLoss`).

    Attributes:
        inner: the call's outputs from which others are computed, once it has some.
    """

    inner = InnerOutputs(None, {})

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        held: Sequence[Any],
        call: Call,
        guard: Guard,
        random: RandomStates | None,
        used: Callable[[str, bool], None],
        other_order: OtherOrder | None = None,
        fewer_outputs: OtherLoss | None = None,
    ) -> None:
        self._other_order, self._fewer_outputs = other_order, fewer_outputs
        self._captured, self._model, self._call, self._guard = captured, model, call, guard
        self._autocast, self._used, self._counted = autocast_state(), used, False
        self._random, self._held = random, held
        self._replay = [] if random is None else random.replay_from_now()

    def check_unchanged(self, values: Sequence[Any]) -> None:
        """Check, before the backward, the values that eager would read in it.

        Raises:
            ExecutionError: one has changed since the forward, whose values the planned
                backward uses.
        """
        difference = self._guard.late_difference(self._model, values)
        if difference is not None:
            raise ExecutionError(
                f"{difference}, since this step's forward. The unplanned backward (a custom "
                "autograd function's, a tensor's hook or a checkpoint) reads it when it runs, the "
                "planned one has the forward's: set it before the forward, or train that model "
                "without a plan (memopt.unwrap(model), or planned.original)"
            )

    def gradients(
        self, tangents: list[Any], why: str, planned: Again | None = None
    ) -> tuple[Any, ...]:
        """Return the gradients of the joint graph's inputs, differentiable under
        `create_graph=True`.

        Args:
            tangents: the gradients of its outputs, in the joint graph's order; None for none.
            why: why it runs, a key of `REMEDIES`.
            planned: as of `gradients_from`; None: the unplanned model runs.

        Raises:
            ExecutionError: the forward cannot run again as it ran.
        """
        if why is PARTIAL:
            planned = self._for_fewer_outputs(tangents)
        run = self._gradients if self._random is None else self._random.settling(self._gradients)
        found: tuple[Any, ...] = run(tangents, why, planned)
        return found

    def _for_fewer_outputs(self, tangents: Sequence[Any]) -> Again | None:
        """Return a function that runs the call under a plan for a loss of only the outputs that got
        gradients; None if there is no such plan."""
        met, missing = self._fewer_outputs, (i for i, one in enumerate(tangents) if one is None)
        used = used_leaves(self._captured, frozenset(missing))
        given_bytes = sum(one.nbytes for one in tangents if one is not None)
        return (lambda call: met(call, used, given_bytes)) if met and used else None

    def in_order(self, orders: Mapping[int, tuple[int, ...]], given: list[Any]) -> Again | None:
        """Return a function that runs the call under a plan for gradients that arrive in these
        orders; None if the call cannot run again."""
        # Gradients of what the forward leaves behind are no gradients of outputs.
        if self._other_order is None or self._captured.effects.made_by_call:
            return None
        try:
            self._check_runs_again(IN_OTHER_ORDER)
            self._guard.check(self._model, self._call)
        except (ExecutionError, GuardError):
            return None
        given_bytes = sum(one.nbytes for one in given if one is not None)
        return self._other_order(tuple(sorted(orders.items())), given_bytes)

    def gradients_from(
        self,
        gradients: Mapping[int, torch.Tensor],
        wanted: Sequence[torch.Tensor],
        planned: Again,
    ) -> tuple[Any, ...]:
        """Return the gradients of the tensors `wanted` from those of output leaves, by position,
        of which some have no planned backward.

        Args:
            gradients, wanted: see above.
            planned: returns the model under a plan that has one, which runs once more from its
                forward; if it returns None the unplanned model does.

        Raises:
            ExecutionError: the forward cannot run again as it ran.
        """

        def run() -> tuple[Any, ...]:
            self._check_runs_again(OTHER_LOSS)
            refusal = partial(_cannot, OTHER_LOSS)
            replaced = replaced_since(self._captured, self._model, self._held, refusal)
            inner, asked = apart(self._call, wanted, replaced, refusal)
            instead = self._planned(planned, inner)
            leaves = self._outputs_again(inner, OTHER_LOSS, replaced, instead)
            pairs = [(leaves[position], gradient) for position, gradient in gradients.items()]
            retained = self.inner.hooked(leaves, gradients)
            del leaves
            return gradients_of(pairs, asked, retained)

        found = run() if self._random is None else self._random.settling(run)()
        return found

    def asked_inside(self, tangents: Sequence[Any]) -> bool:
        """Return whether a hook, or whoever retains it, asks for an output's gradient a part of
        which comes from inside of the plan."""
        pairs = zip(self._captured.tangents, tangents, strict=True)
        begun = [_index_of(node) for node, tangent in pairs if tangent is not None]
        return self.inner.asked([i for i in begun if i is not None])

    def _planned(self, planned: Again, call: Call) -> nn.Module | None:
        with autocast_as(self._autocast), torch.enable_grad():
            return planned(call)

    def _gradients(self, tangents: list[Any], why: str, planned: Again | None) -> tuple[Any, ...]:
        captured, call, held = self._captured, self._call, iter(self._held)
        wanted = [i for i, gradient in enumerate(captured.gradients) if gradient is not None]
        values = [
            next(held) if one.held else one.value(self._model, call.leaves)
            for one in captured.primals
        ]
        refusal = partial(_cannot, why)
        replaced = replaced_since(captured, self._model, self._held, refusal)
        inner, primals = apart(call, [values[i] for i in wanted], replaced, refusal)
        instead = None if planned is None else self._planned(planned, inner)
        found = self._outputs_again(inner, why, replaced, instead)
        begun = zip(captured.tangents, tangents, strict=True)
        pairs = [(_leaf_of(one, why), tangent) for one, tangent in begun if tangent is not None]
        if any(leaf >= len(found) for leaf, _ in pairs):
            shown = ", ".join(captured.effects.shown)
            raise refusal(f"a gradient comes from {shown}, where it leaves tensors behind")
        retained = self.inner.hooked(found, dict(pairs))
        computed = gradients_of([(found[leaf], one) for leaf, one in pairs], primals, retained)
        by_position = dict(zip(wanted, computed, strict=True))
        return tuple(by_position.get(i) for i in range(len(captured.gradients)))

    def _check_runs_again(self, why: str) -> None:
        """Raise ExecutionError if the forward reads what it updates, or draws under vmap."""
        if why is BATCHED and self._random is not None:
            raise _cannot(why, "it draws random numbers, which vmap refuses")
        written = next(_read_and_written(self._captured), None)
        if written is not None:
            raise _cannot(why, f"it has updated {written}, which it reads")

    def _outputs_again(
        self, inner: Call, why: str, replaced: Mapping[int, Any], instead: nn.Module | None
    ) -> list[Any]:
        """Run the unplanned forward, or `instead`, as this call's forward ran; return the leaves of
        its output."""
        model, call = self._model, self._call
        self._check_runs_again(why)
        with ExitStack() as stack:
            stack.enter_context(state_restored(model, call))
            stack.enter_context(unplanned())
            stack.enter_context(engine_off(model))
            stack.enter_context(holding(model, replaced))
            for one in self._replay:
                stack.enter_context(one)
            stack.enter_context(autocast_as(self._autocast))
            stack.enter_context(torch.enable_grad())
            try:
                self._guard.check(model, call)
            except GuardError as error:
                raise ExecutionError(
                    f"{why}; its forward cannot run again for that as it ran: {error}"
                ) from error
            if instead is not None or not self._counted:
                self._used(why, instead is not None)
            self._counted = self._counted or instead is None
            return list(pytree.tree_leaves((instead or model)(*inner.args, **inner.kwargs)))


def _cannot(why: str, cause: str) -> ExecutionError:
    return ExecutionError(
        f"{why}; its forward cannot run again for that: {cause}. You can {REMEDIES[why]}"
    )


def why_not_planned(tangents: Sequence[Any], again: AsOriginal) -> str | None:
    """Return why a call's backward that begins with these gradients has no plan; None: it has
    one."""
    if torch.is_grad_enabled():
        return DIFFERENTIATED
    if any(map(is_batch, tangents)):
        return BATCHED
    return INNER if again.asked_inside(tangents) else None


def draws(captured: Captured) -> bool:
    """Return whether a captured model draws random numbers."""
    return any(is_random(node) for node in captured.module.graph.nodes)


def pattern(call: Call) -> tuple[bool, ...]:
    """Return which arguments of a call are leaves that require a gradient. (For a gradient penalty
    a model is called with such arguments, else without.)"""
    return tuple(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        for leaf in call.leaves
    )


def used_leaves(captured: Captured, missing: frozenset[int]) -> frozenset[int]:
    """Return the leaves of a captured model's output from which a backward without some tangents
    begins. Empty if the model could not run again for a backward from other leaves."""
    leaves = [_index_of(tangent) for tangent in captured.tangents]
    if captured.effects.made_by_call or next(_read_and_written(captured), None) is not None:
        return frozenset()
    return frozenset(i for n, i in enumerate(leaves) if i is not None and n not in missing)


def _index_of(tangent: Node) -> int | None:
    output: Any = getattr(tangent.meta["desc"], "output", None)
    index: int | None = getattr(output, "idx", None)
    return index


def _leaf_of(tangent: Node, why: str) -> int:
    """Return the index of the output leaf that a tangent is the gradient of."""
    output, index = getattr(tangent.meta["desc"], "output", None), _index_of(tangent)
    if index is None:
        raise _cannot(why, f"a gradient of {output!r} is asked for")
    return index


def _read_and_written(captured: Captured) -> Iterator[str]:
    """Yield names of tensors that the forward updates in place and reads itself: if it ran again,
    it would read its own results. Statistics of a batch norm in training are not read."""
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
    """Return whether an operator reads a value as statistics that it only updates."""
    schema = schema_of(user.target) if isinstance(user.target, OpOverload) else None
    if schema is None or "batch_norm" not in schema.name or user.target is operator.getitem:
        return False
    named = zip(schema.arguments, user.args, strict=False)
    readers = [one.name for one, given in named if given is value]
    return bool(readers) and all(name in _STATISTICS for name in readers)

"""The state of planned steps between their forward and their backward.

AOTAutograd saves one 0-d int64 token per call, the key to the step's saved tensors, host copies
and generator states. A state is dropped when its token dies (the backward never came) or when its
backward has run, unless the graph is retained.
"""

from __future__ import annotations

import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from memopt.errors import ExecutionError
from memopt.executor.absent_gradients import call_hooks_of_gradients_alone
from memopt.executor.added_later import AddedLater
from memopt.executor.arriving_layouts import ArrivedLayouts, ArrivingLayouts
from memopt.executor.backward_settings import BackwardSettings
from memopt.executor.differentiated import (
    HALVED,
    IN_OTHER_ORDER,
    PARTIAL,
    REMEDIES,
    AsOriginal,
    draws,
    why_not_planned,
)
from memopt.executor.handover import Handover
from memopt.executor.held_memory import besides, memory_of
from memopt.executor.installed import Installed
from memopt.executor.partial_backward import FirstHalf
from memopt.executor.prepared_backward import prepare_backward
from memopt.executor.random_state import RandomStates
from memopt.executor.saved_tensor_hooks import token_as_it_is
from memopt.executor.swap import TiedValue, tie
from memopt.models.charges import Charges
from memopt.step.assumed import failing_as_assumed
from memopt.step.backend import autocast_off
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.step.model_outputs import as_users_see, handed_out, in_memory_of_its_own
from memopt.torch_private.modes import keeps_graph
from memopt.torch_private.tensors import version_of

_KEYS = itertools.count(1)

Arrived: TypeAlias = Callable[[list[Any], frozenset[int], Charges], None]
"""Called with the gradients of the outputs when a call's backward begins, which are missing, and
what is charged: if it keeps the graph, and for gradients of an earlier one that did."""


@dataclass
class _State:
    key: int
    program: Installed
    primals: list[Any]
    versions: tuple[int, ...]
    settings: tuple[Any, ...]
    outputs: list[torch.Tensor]
    output_versions: list[int]
    saved: list[Any]
    again: AsOriginal | None
    handover: Handover | None
    arrived: Arrived | None
    layouts: ArrivedLayouts
    first_half: FirstHalf | None = None
    made: Sequence[weakref.ref[Any]] = ()  # the gradients of a backward that kept its graph


@dataclass
class _Call:
    """A call under way.

    Attributes:
        program: the program that runs.
        again: runs the call without a plan.
        arrived: called when its backward begins.
        handover: hands its gradients over as they are complete; None: all come at the end.
        moves: (updated tensor, new value) pairs, once the whole forward has run.
        layouts: the gradients that arrived in another layout than planned.
    """

    program: Installed
    again: AsOriginal | None
    arrived: Arrived | None = None
    handover: Handover | None = None
    moves: list[tuple[Any, Any]] | None = None
    layouts: ArrivedLayouts = field(default_factory=ArrivedLayouts)


class _ThreadCall(threading.local):
    """The call that each thread makes. The reference is weak, so that an interrupted call leaves
    nothing behind."""

    call: weakref.ref[_Call] | None = None


class Runtime:
    """Runs installed programs inside one captured model; set as its hooks once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._settings = BackwardSettings(captured)
        self._added_later, self._layouts = AddedLater(captured), ArrivingLayouts(captured)
        self._sharded = any(primal.part for primal in captured.primals)
        device = captured.device or torch.device("cpu")
        self.random = RandomStates(device) if draws(captured) else None
        self._local = _ThreadCall()
        self._states: set[TiedValue[_State]] = set()
        captured.hooks.forward = self._forward
        captured.hooks.backward = self._backward
        captured.hooks.owner = self

    def __len__(self) -> int:
        """Number of steps whose backward has not run yet."""
        return len(self._states)

    @property
    def halved(self) -> int:
        """Number of steps of which the second half of the backward has not run yet."""
        return sum(one.value.first_half is not None for one in list(self._states))

    def drop(self, again: AsOriginal) -> None:
        """Free what a call has saved for its backward, which is not to run, unless it keeps its
        graph."""
        kept = [one for one in list(self._states) if one.value.again is again]
        for one in [] if keeps_graph() else kept:
            one.value.saved = []
            self._states.discard(one)

    def run(
        self,
        program: Installed,
        held: list[Any],
        call: Call,
        again: AsOriginal | None = None,
        arrived: Arrived | None = None,
    ) -> Any:
        """Call the captured model with `program`.

        Args:
            program: the program to run.
            held: values of the parameter and buffer primals, in the primals' order.
            call: the user's arguments, in the captured call's form.
            again: runs the call without a plan, for a backward that is differentiated itself.
            arrived: called when its backward begins.
        """
        before = self._local.call
        drawn = None if self.random is None else self.random.now()
        chain = None
        if program.handover is not None and torch.is_grad_enabled():
            chain, held, call = program.handover.chained(held, call)
        made = _Call(program, again, arrived, chain)
        try:
            self._local.call = weakref.ref(made)
            args, kwargs = call.plain
            with token_as_it_is():
                output = self._captured.compiled(*held, *args, **kwargs)
            if torch.is_grad_enabled():
                prepare_backward(output, self._captured.outputs)
                self._settings.follow(output)
                self._layouts.look(output, made.layouts)
            output = as_users_see(output, self._captured.outputs)
            return output[0] if self._captured.assumed else output
        except BaseException:
            # Once all of the forward has run its updates are completed, else all is restored.
            if made.moves is not None:
                with torch.no_grad():
                    for target, value in made.moves:
                        target.detach().copy_(value)
            elif drawn is not None and self.random is not None:
                self.random.restore(drawn)
            raise
        finally:
            self._local.call = before

    def _forward(self, args: list[Any]) -> list[Any]:
        call = self._local.call and self._local.call()
        assert call
        program = call.program
        primals = list(args)
        args.clear()
        with failing_as_assumed(self._captured.assumed, and_numbers=True):
            outputs, saved = program.forward(primals)
        program.look(outputs)
        key = next(_KEYS)
        token = torch.tensor(key, dtype=torch.int64, device="cpu")
        versions = tuple(map(version_of, map(primals.__getitem__, program.watched)))
        # Aliases: what autograd attaches to the outputs must not keep the state, which may hold
        # the same tensors, and with it the token, alive.
        watched = [outputs[i].detach() for i in program.watched_outputs]
        output_versions = [*map(version_of, watched)]
        state = _State(
            key,
            program,
            primals,
            versions,
            self._settings.now(program.recomputes),
            watched,
            output_versions,
            saved,
            call.again,
            call.handover,
            call.arrived,
            call.layouts,
        )
        tie(self._states, token, state)
        mutated = self._captured.mutated
        call.moves = [(primals[p], v) for p, v in zip(mutated, outputs, strict=False)]
        shared = [leaf in self._captured.outputs.shared for leaf in self._captured.leaves]
        return [*map(handed_out, outputs, shared), token]

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run a step's backward. On a device it runs in a thread of autograd's, which drops what
        has failed there some time after the caller has the error: memory that ran out is freed
        before, so that the caller's next step finds it."""
        try:
            return self._run_backward(args)
        except torch.OutOfMemoryError as error:
            args.clear()
            traceback.clear_frames(error.__traceback__)
            raise

    def _run_backward(self, args: list[Any]) -> tuple[Any, ...]:
        key = int(args[0])
        kept = next((one for one in list(self._states) if one.value.key == key), None)
        if all(tangent is None for tangent in args[1:]):
            none = (None,) * len(self._captured.gradients)
            return self._as_taken(none) if kept is None else self._given(kept.value, none)
        if kept is None:
            raise ExecutionError(
                "the saved state of this step is gone: backward ran twice without "
                "retain_graph=True, or the step was dropped"
            )
        state = kept.value
        program = state.program
        self._look_for_changes(state)
        if state.again is not None:
            state.again.check_unchanged(state.primals)
        if state.again is not None and (why := why_not_planned(args[1:], state.again)):
            return self._as_original(state, args[1:], why)
        if state.first_half is not None:
            return self._second_half(state, state.first_half, args[1:])
        half = FirstHalf.running(self._captured.primals, args[1:], state.handover)
        missing = frozenset(i for i, tangent in enumerate(args[1:]) if tangent is None)
        self._layouts.without(state.layouts, missing)
        differs = state.layouts.orders and half is None
        if differs and (found := self._in_other_order(state, args[1:])):
            return found
        run, in_halves = program.backward, program.in_halves
        if missing:
            partial = program.partial(missing)
            whole = self._sharded or state.handover is not None
            if partial is None or (partial.run is not None and whole):
                return self._as_original(state, args[1:], PARTIAL)
            if partial.run is not None:
                run, in_halves = partial.run, partial.in_halves
            partial.complete(args, self._captured.tangents)
        self._layouts.put_back(state.layouts, args, program.by_kernels)
        for i, value in enumerate(args):
            args[i] = in_memory_of_its_own(value)
        del value
        if state.arrived is not None:
            state.arrived(args[1:], missing, self._charges(state, half))
        saved = state.saved
        if half is not None:
            state.saved, state.first_half = [], half
            run = half.first(run, in_halves)
        elif keeps_graph():
            saved = program.fork(saved)
        else:
            self._states.discard(kept)
            del kept
        if state.handover is not None and program.handover is not None:
            running = program.handover.running(state.primals, args, saved)
            return state.handover.begin(running, self._added_later)
        with autocast_off():
            gradients = run(state.primals, args, saved)
        if keeps_graph():
            # Not their memory: autograd adds to no gradient in place whose storage Python has seen.
            state.made = [weakref.ref(one) for one in gradients if one is not None]
        return self._given(state, gradients)

    def _charges(self, state: _State, half: FirstHalf | None) -> Charges:
        """Return what a backward needs if it keeps its graph, and what the loop holds of the
        gradients of an earlier one that did, which are no parameter's."""
        own: list[Any] = []
        others: list[Any] = [one() for one in state.made]
        pairs = zip(self._captured.primals, state.primals, strict=True)
        for primal, value in pairs if others else ():
            if isinstance(value, torch.Tensor) and value.is_leaf:
                (own if primal.held else others).append(value.grad)
        keeps = int(keeps_graph() and half is None)
        return Charges(kept_graphs=keeps, kept_bytes=besides(memory_of(others), memory_of(own)))

    def _second_half(self, state: _State, half: FirstHalf, tangents: list[Any]) -> tuple[Any, ...]:
        if state.arrived is not None and keeps_graph():
            state.arrived([], frozenset(), Charges(kept_gradients=1))
        rest = half.second(tangents)
        return self._given(state, rest) if rest else self._as_original(state, tangents, HALVED)

    def _as_original(self, state: _State, tangents: list[Any], why: str) -> tuple[Any, ...]:
        """Return the gradients of the unplanned model, which runs again."""
        if self._sharded or state.handover is not None or state.again is None:
            raise ExecutionError(
                f"{why}, which a planned module of sharded parameters, or inside "
                f"DistributedDataParallel, cannot do: {REMEDIES[why]}"
            )
        self.drop(state.again)
        return self._given(state, state.again.gradients(tangents, why))

    def _in_other_order(self, state: _State, tangents: list[Any]) -> tuple[Any, ...] | None:
        """Return the gradients of a call that runs again, planned for the layouts in which its
        outputs' gradients arrived; None: they are copied."""
        again = None if self._sharded or state.handover is not None else state.again
        planned = None if again is None else again.in_order(state.layouts.orders, tangents)
        if again is None or planned is None:
            self._layouts.say(state.layouts)
            return None
        self.drop(again)
        given = self._layouts.as_arrived(state.layouts, tangents)
        return self._given(state, again.gradients(given, IN_OTHER_ORDER, planned))

    def _given(self, state: _State, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return those of a step's gradients that AOTAutograd takes, their hooks in order."""
        self._added_later.look(state.primals, gradients.__getitem__)
        call_hooks_of_gradients_alone(state.primals, gradients)
        return self._as_taken(gradients)

    def _as_taken(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        given = self._captured.given
        if len(given) == len(gradients):
            return gradients
        return tuple(gradients[i] for i in given)

    def _look_for_changes(self, state: _State) -> None:
        """Check what has changed since a forward: warn of settings, refuse changed tensors."""
        program = state.program
        self._settings.look(state.settings)
        for position, version in zip(program.watched, state.versions, strict=True):
            if version_of(state.primals[position]) != version:
                raise ExecutionError(
                    f"{program.names[position]} was changed in place between this step's forward "
                    "and its backward; the gradients would be wrong. Update parameters after "
                    "backward()"
                )
        for position, value, version in zip(
            program.watched_outputs, state.outputs, state.output_versions, strict=True
        ):
            if version_of(value) != version:
                raise ExecutionError(
                    f"output {self._captured.leaves[position]} of the planned model was changed in "
                    "place before its backward, which needs its value: change a copy (clone())"
                )

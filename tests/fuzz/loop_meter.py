"""Meters what an action of a random training loop needs, from its first planned call to the end of
its last backward (`tests.fuzz.loop_budgets`)."""

from __future__ import annotations

import collections
import gc
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from memopt.executor import surroundings
from memopt.executor.held_memory import memory_of
from memopt.executor.plan_maker import Made
from memopt.executor.self_planning import SelfPlanning
from memopt.executor.surroundings import Surroundings
from memopt.pricing import memory
from memopt.torch_private.modes import backward_number
from tests.fuzz.loop_state import Loop

_STATE_BYTES = torch.get_rng_state().nbytes
"""Of copies of the generator's state, which memopt and torch's checkpoint make where a call begins.
They are left out: no model but the smallest has its peak there."""


class LoopMeter:
    """Meters a loop's actions, each from where its first call has its plan. While one is metered
    memopt can neither plan nor meter: an action that wants a plan is not metered to its end.

    Attributes:
        ran: the plans under which the present action's calls ran.
        settled: whether the present action asked for no plan.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._opened: ExitStack | None = None
        self._profiler: Any = None
        self._due = False
        self.ran: list[Made] = []
        self.settled = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See planned calls, and the ends of backwards."""
        ran, can_measure = SelfPlanning._ran, Surroundings.can_measure

        def watched(asking: SelfPlanning, made: Made, *given: Any) -> Any:
            self._begins(made, given)
            try:
                return ran(asking, made, *given)
            finally:
                self._mark()

        def asked(around: Surroundings, *given: Any) -> bool:
            self.settled = False
            self._close()
            return can_measure(around, *given)

        def ended(call: Callable[..., Any]) -> Callable[..., Any]:
            def marked(*args: Any, **kwargs: Any) -> Any:
                try:
                    return call(*args, **kwargs)
                finally:
                    self._mark()

            return marked

        with ExitStack() as patches:
            for owner, name, new in (
                (SelfPlanning, "_ran", watched),
                (Surroundings, "can_measure", asked),
                (surroundings, "is_metered", lambda _: True),
                (torch.autograd, "backward", ended(torch.autograd.backward)),
                (torch.autograd, "grad", ended(torch.autograd.grad)),
            ):
                patches.enter_context(patch.object(owner, name, new))
            patches.callback(self._close)
            yield

    def begin(self, metered: bool) -> None:
        """Begin an action, which is metered or not."""
        gc.collect()
        self.ran, self.settled, self._due = [], True, metered
        self._before: dict[int, Any] = {}
        self._levels: list[int] = []

    def peak_bytes(self) -> int | None:
        """End the action: the most bytes of its steps; None: it was not metered to its end."""
        whole = self._opened is not None
        self._due = False
        self._close()
        return self._peak() if whole and self._levels else None

    def _begins(self, made: Made, given: Any) -> None:
        self.ran.append(made)
        if self._due:
            self._due = False
            self._before = self._memory(self._live(given))
            self._opened = ExitStack()
            self._profiler = self._opened.enter_context(memory.cpu_profile())
        self._mark()

    def _live(self, given: Any) -> list[Any]:
        """What the step finds: model, gradients, the optimizer's state, outputs, inputs."""
        model = self._loop.model
        found = [*model.parameters(), *model.buffers(), *self._loop.held]
        found += [one.grad for one in model.parameters()]
        own = set(model.parameters())  # the state of one that was replaced is the loop's
        for parameter, state in self._loop.optimizer.state.items():
            found += state.values() if parameter in own else ()
        return found + pytree.tree_leaves(given)

    @staticmethod
    def _memory(found: list[Any]) -> dict[int, Any]:
        """The storages of tensors, with the bytes that these take of them: a loop may leave unused
        what else is there, as `vector_to_parameters` does when a parameter is replaced."""
        used: collections.Counter[int] = collections.Counter()
        for one in {id(one): one for one in found if isinstance(one, torch.Tensor)}.values():
            used[one.untyped_storage().data_ptr()] += one.nbytes
        whole = memory_of(found)
        return {at: (storage, min(size, used[at])) for at, (storage, size) in whole.items()}

    def _mark(self) -> None:
        """Between a mark and the next, the step runs with what it found and is still there."""
        if self._opened is not None and backward_number() == -1:
            there = (size for one, size in self._before.values() if not one.expired())
            self._levels.append(sum(there))
            memory._MARK()

    def _close(self) -> None:
        if self._opened is not None and backward_number() == -1:
            opened, self._opened = self._opened, None
            opened.close()

    def _peak(self) -> int:
        times = memory._marked_at(self._profiler)
        events = memory.memory_events(self._profiler)
        events = [(time, size) for time, size in events if abs(size) != _STATE_BYTES]
        levels = itertools.accumulate((size for _, size in events), initial=0)
        most, before = 0, times[0]
        for time, level in zip([times[0], *(time for time, _ in events)], levels, strict=True):
            if before <= time <= times[-1]:
                mark = bisect_right(times, time) - 1
                most = max(most, level + self._levels[mark])
        return most

"""Checks that everything a captured model's trace read is as it was."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn

from memopt.capture.trace import traced_again
from memopt.errors import CaptureError
from memopt.models.warned import warn
from memopt.step.captured import Captured
from memopt.step.dependencies import Dependencies
from memopt.step.described import same
from memopt.step.inputs import Call
from memopt.step.reader import Dependency
from memopt.torch_private.engine_hooks import engine_off
from memopt.user_code.aside import aside

_LOG = logging.getLogger(__name__)
_MOST_STATES = 8


class _KnownState:
    """A state of everything that a trace read for which its graph is known to be right.

    Args:
        dependencies: the values read, and their state.
        structure: the same of modules, parameters and buffers.
        recomputes: see `Dependencies.late`.
    """

    def __init__(
        self, dependencies: Dependencies, structure: Sequence[Dependency], recomputes: bool
    ) -> None:
        self.dependencies, self._recomputes = dependencies, recomputes
        self.everything = dependencies.with_others(structure)

    @cached_property
    def late(self) -> Dependencies:
        """The dependencies that eager reads in the backward."""
        return self.dependencies.late(self._recomputes)


class DependencyCheck:
    """Checks everything that one captured model's trace read."""

    def __init__(
        self, captured: Captured, dependencies: Dependencies, structure: Sequence[Dependency]
    ) -> None:
        self._captured, self._structure = captured, structure
        # The state that the last call matched comes first.
        self._states: list[_KnownState] = []
        self._add(dependencies)
        self._refused: tuple[Dependency, Any] | None = None
        self._traces = 0

    def _add(self, dependencies: Dependencies) -> None:
        state = _KnownState(dependencies, self._structure, self._captured.outputs.recomputes)
        self._states = [state, *self._states][:_MOST_STATES]

    def unchanged(self, model: nn.Module) -> bool:
        """Return whether all is as planned, the structure included."""
        for state in self._states:
            if state.everything.unchanged(model):
                if state is not self._states[0]:
                    self._states = [state, *(one for one in self._states if one is not state)]
                return True
        return False

    def difference(self, model: nn.Module, call: Call) -> str | None:
        """Return a text with what changed before a call and both values; None if all is as planned.

        Where a global is concerned, or a value that the forward itself changes, Dynamo's guards are
        stricter than the graph needs: a registry that has grown fails them. Where only such values
        changed, the model is traced again and accepted if it gives the same graph.
        """
        found = [state.dependencies.changed(model) for state in self._states]
        if None in found or found[0] is None:
            return None
        dependency, value = found[0]
        difference = dependency.difference(value)
        refused = self._refused
        known = refused and refused[0] is dependency and same(value, refused[1])
        if dependency.shared and not known:
            _LOG.info("tracing again: %s", difference)
            dependencies = self._traced_again(model, call)
            if dependencies is not None:
                self._add(dependencies)
                self._count(difference)
                return None
            # A trace takes seconds, so it is not repeated for every call.
            self._refused = (dependency, value)
        if self._captured.effects:
            difference += " (if a first call made that, call the model once before planning)"
        return difference

    def _count(self, difference: str) -> None:
        """Warn, once, if every call finds another state."""
        self._traces += 1
        if self._traces == _MOST_STATES:
            warn(
                f"the model was traced {self._traces} times again, which takes seconds each: "
                "something that its forward reads or adds to differs from call to call (the last: "
                f"{difference}). Clear such lists and dicts between steps",
            )

    def late_difference(self, model: nn.Module, values: Sequence[Any]) -> str | None:
        """Return a text with the first of the values that eager reads in the backward which changed
        since the forward; None if none did."""
        late = self._states[0].late
        with engine_off(model):  # as in the forward
            changed = None if late.unchanged(model) else late.changed(model)
        if changed is not None:
            dependency, found = changed
            return dependency.difference(found)
        if late.late_names == frozenset():
            return None
        for primal, value in zip(self._captured.primals, values, strict=True):
            source = late.source_of(primal.constant) if primal.constant is not None else primal.name
            if (
                primal.held
                and not primal.part
                and not self._captured.sets(primal)
                and late.may_read(source)
                and primal.value(model, ()) is not value
            ):
                return f"{source} is another tensor"
        return None

    @aside
    def _traced_again(self, model: nn.Module, call: Call) -> Dependencies | None:
        one = self._captured
        traced = one.example(call)
        try:
            return traced_again(model, traced, one.device, one.trace)
        except (CaptureError, RuntimeError):
            return None
        finally:
            # Dynamo's reference cycles hold them until Python collects garbage.
            traced.release(one.call)

"""The state of planned steps between their forward and their backward.

AOTAutograd saves one 0-d int64 token per call; the kept tensors, host copies and generator
states are found by it. A state goes when its token dies (the backward never came) or when its
backward has run, unless the graph is retained.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memopt.errors import ExecutionError
from memopt.executor.kept import Kept, keep
from memopt.profiler.autocast import autocast_off
from memopt.profiler.capture import Captured
from memopt.profiler.inputs import Call
from memopt.profiler.torch_private import keeps_graph

_KEYS = itertools.count(1)


@dataclass(frozen=True)
class Installed:
    """A program ready to run in a captured model.

    Attributes:
        forward: `forward(primals) -> (outputs, saved)`.
        backward: `backward(primals, arguments, saved) -> gradients`.
        watched: positions of the primals whose change between forward and backward would
            give wrong gradients.
        names: the primals' names, for messages.
        source: the generated code; "" when interpreted.
        fork: what a backward runs with that may come again, of what the forward has left.
    """

    forward: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[list[Any], list[Any], list[Any]], tuple[Any, ...]]
    watched: tuple[int, ...]
    names: tuple[str, ...]
    source: str = ""
    fork: Callable[[list[Any]], list[Any]] = list


@dataclass
class _State:
    key: int
    program: Installed
    primals: list[Any]
    versions: tuple[int, ...]
    saved: list[Any]


class Runtime:
    """Runs installed programs inside one captured model; set as its hooks once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._local = threading.local()
        self._states: set[Kept[_State]] = set()
        captured.hooks.forward = self._forward
        captured.hooks.backward = self._backward
        captured.hooks.owner = self

    def __len__(self) -> int:
        """Number of steps whose backward has not run yet."""
        return len(self._states)

    def run(self, program: Installed, held: list[Any], call: Call) -> Any:
        """Call the captured model with `program`.

        Args:
            program: what to run.
            held: values of the parameter and buffer primals, in the primals' order.
            call: the user's arguments, in the captured call's form.
        """
        before = getattr(self._local, "program", None)
        try:
            self._local.program = program
            return self._captured.compiled(*held, *call.args, **call.kwargs)
        finally:
            self._local.program = before

    def _forward(self, args: list[Any]) -> list[Any]:
        program: Installed = self._local.program
        primals = list(args)
        args.clear()
        outputs, saved = program.forward(primals)
        key = next(_KEYS)
        token = torch.tensor(key, dtype=torch.int64)
        versions = tuple(primals[i]._version for i in program.watched)
        keep(self._states, token, _State(key, program, primals, versions, saved))
        return [*outputs, token]

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        key = int(args[0])
        kept = next((one for one in list(self._states) if one.value.key == key), None)
        if kept is None:
            raise ExecutionError(
                "the saved state of this step is gone: backward ran twice without "
                "retain_graph=True, or the step was dropped"
            )
        state = kept.value
        program = state.program
        for position, version in zip(program.watched, state.versions, strict=True):
            if state.primals[position]._version != version:
                raise ExecutionError(
                    f"{program.names[position]} was changed in place between this step's forward "
                    "and its backward; the gradients would be wrong. Update parameters after "
                    "backward()"
                )
        saved = state.saved
        if keeps_graph():
            saved = program.fork(saved)
        else:
            self._states.discard(kept)
            del kept
        with autocast_off():
            return program.backward(state.primals, args, saved)

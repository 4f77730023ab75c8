"""Runs optimizer updates on the host beside the device, one after the other, in one thread.

Parameter and state are the host copies, which the optimizer's own step changes in place; the
gradient is the host copy that the plan has made of it. The optimizer that steps there is a shallow
copy of the user's, with the same state and one parameter, so that updates on the device go on
meanwhile. If the device is not the host itself (it then rounds differently anyway), torch's fused
step is used if there is one: a single pass over memory. After an update that failed, later ones
do not run.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.fx import Node

from memopt.executor.swap import StoredTensor, ThreadSwap
from memopt.executor.swap_streams import StreamSwap
from memopt.executor.undo import Changes, Undo
from memopt.executor.worker import Task, Worker
from memopt.step.backend import backend_of
from memopt.step.build import Lowering
from memopt.step.step_optimizer import Touch, group_of, update_one
from memopt.torch_private.modules import note_step

Step: TypeAlias = Callable[[torch.Tensor], None]
RunStep: TypeAlias = Callable[[str, torch.Tensor, Step], None]
"""(parameter's name, gradient, function that steps it by a gradient) → steps it and notes that."""


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers with a fused step on CPU."""


class HostUpdates:
    """The thread that runs updates on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        fused = type(optimizer) in FUSED and not backend_of(device).on_host
        self._options = {"fused": True, "foreach": None} if fused else {}
        self._own = copy.copy(optimizer)
        self._worker = Worker("memopt-host")
        self._tasks: dict[int, tuple[Task, torch.Tensor]] = {}
        """Gradient's tensor → its update, and the parameter."""
        self._stopped = threading.Event()
        self._run: RunStep | None = None

    def begin(self, run: RunStep) -> None:
        """Begin a train step, which notes its updates by `run`."""
        self._run = run
        self._stopped.clear()

    def submit(
        self,
        name: str,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        copied: tuple[int, StoredTensor],
        swap: ThreadSwap | StreamSwap,
    ) -> None:
        """Let the host update a parameter.

        Args:
            name: the parameter's name.
            parameter: its data are on the host.
            gradient: a fake tensor of its shape.
            copied: the gradient's tensor in the graph, and its host copy, perhaps under way.
            swap: makes that copy.
        """
        tensor, stored = copied
        here = swap.fence(stored)  # type: ignore[arg-type]
        group = {**group_of(self._optimizer, parameter), **self._options, "params": [parameter]}
        # The optimizer's own step notes this for learning-rate schedulers, which warn otherwise.
        note_step(self._optimizer)

        def step(value: torch.Tensor) -> None:
            self._own.state = self._optimizer.state
            self._own.param_groups = [group]
            update_one(self._own, parameter, value)

        def update() -> None:
            if self._stopped.is_set():
                return
            try:
                here()
                assert self._run is not None
                with torch.no_grad():
                    self._run(name, stored.on_host(gradient), step)
            except BaseException:
                self._stopped.set()
                raise

        self._tasks[tensor] = self._worker.submit(update), parameter

    def wait(self, tensor: int) -> None:
        """Wait for the update that reads a gradient, and raise what it raised."""
        task, _ = self._tasks.pop(tensor, (None, None))
        if task is not None:
            task.result()

    def until(self, parameter: torch.Tensor) -> None:
        """Wait until no update of a parameter is under way."""
        for task, updated in list(self._tasks.values()):
            if updated is parameter:
                task.wait()

    def stop(self) -> None:
        """Run no more updates in this step, and wait for the running one."""
        if self._tasks:
            self._stopped.set()
            self._worker.settle()
            self._tasks.clear()


def update_there(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    changes: Changes,
    undo: Undo | None,
    name: str,
    gradient: torch.Tensor,
    step: Step,
) -> None:
    """Step a parameter on the host, in the update thread of a train step, and note the change."""
    parameter = parameters[name]
    if undo is not None:
        undo.keep_update(parameter)
    touch = Touch(optimizer, parameter)
    try:
        step(gradient)
    except BaseException:
        if touch.changed():
            changes.half = name.removeprefix("model.")
        raise
    changes.on_host += 1


def gradient_of(lowering: Lowering, op: int) -> tuple[str, Node, int]:
    """Return an update's parameter name, its gradient's node, and the gradient's tensor."""
    name, gradient = lowering.nodes[op].args[:2]
    assert isinstance(name, str)
    assert isinstance(gradient, Node)
    tensor = lowering.storages[gradient][0]
    assert tensor is not None
    return name, gradient, tensor

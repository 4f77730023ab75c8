"""Runs the updates of one train step, of one parameter or several at once, and notes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from memopt.executor.homes import Homes
from memopt.executor.undo import Changes, Undo
from memopt.programs.instructions import Program
from memopt.programs.updates_together import updates_together
from memopt.step.profiled import ProfiledStep
from memopt.step.shards import like_part
from memopt.step.step_optimizer import Groups, HostState, Item, Touch, update_all

_CACHED_BYTES = 2**20


@dataclass
class StepUpdates:
    """The updates of one step.

    Attributes:
        optimizer: steps the parameters.
        parameters: by name.
        homes: the host copies of moved parameters and state.
        host_state: the state, if it is on the host between updates.
        undo: keeps former values.
        changes: what the step has changed.
        skipped: whether nothing is updated, since a gradient is infinite or NaN.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    homes: Homes
    host_state: HostState | None
    undo: Undo | None
    changes: Changes
    skipped: bool = False
    _asked: torch.Tensor | None = None

    @cached_property
    def _groups(self) -> Groups:
        return Groups(self.optimizer)

    def run(self, items: Sequence[Item], largest: torch.Tensor | None) -> None:
        """Run updates that are ready together; see `memopt.step.step_optimizer.Update`."""
        if largest is not None and self._asked is not largest:
            # Asks the device, and so waits, once in a step.
            self._asked = largest
            self.skipped = not math.isfinite(largest.item())
        plain = not (self.homes or self.host_state or self.skipped)
        if plain and all(item[2] is None for item in items):
            self._all(items)
            return
        for item in items:
            self._one(item)

    def _one(self, item: Item) -> None:
        name, gradient, value = item
        if self.skipped and value is None:
            return
        parameter, host_state = self.parameters[name], self.host_state
        if self.undo is not None:
            self.undo.keep_update(parameter)
        touch = Touch(self.optimizer, parameter)
        restores = self.homes.restores(parameter)
        try:
            if value is not None:
                parameter.copy_(like_part(parameter, value))
            with self.homes.updating(parameter):
                if not self.skipped and host_state is not None:
                    host_state.step(parameter, gradient)
                elif not self.skipped:
                    groups = self._groups.of([parameter])
                    update_all(self.optimizer, [parameter], [gradient], touch, groups)
        except BaseException:
            if touch.changed() and not restores:
                self.changes.half = name.removeprefix("model.")
            raise
        self.changes.updated += 1
        if host_state is not None and not self.skipped:
            host_state.put_away(parameter)

    def _all(self, items: Sequence[Item]) -> None:
        names, gradients, _ = zip(*items, strict=True)
        parameters: list[torch.Tensor] = [*map(self.parameters.__getitem__, names)]
        if self.undo is not None:
            for parameter in parameters:
                self.undo.keep_update(parameter)
        touch = Touch(self.optimizer, *parameters)
        try:
            update_all(self.optimizer, parameters, gradients, touch, self._groups.of(parameters))
        except BaseException:
            touched = [name for i, name in enumerate(names) if touch.changed(i)]
            self.changes.half = ", ".join(name.removeprefix("model.") for name in touched)
            raise
        self.changes.updated += len(items)


def together(profiled: ProfiledStep, program: Program) -> dict[int, tuple[int, ...]]:
    """Return the updates that run together, within the peak of the priced step."""
    device = profiled.captured.device
    # On a CPU operators on many tensors run one tensor after the other: all are to stay in its
    # cache meanwhile.
    on_cpu = device is not None and device.type == "cpu"
    return updates_together(profiled.graph, program, _CACHED_BYTES if on_cpu else None)

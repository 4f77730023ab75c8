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
from memopt.models.graph import Graph, Phase
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Program
from memopt.programs.moved import changed_by, moved_tensors
from memopt.programs.replay import outside_bytes, replay
from memopt.step.profiled import ProfiledStep
from memopt.step.shards import like_part
from memopt.step.step_optimizer import Groups, HostState, Item, Touch, update_all

_CACHED_BYTES = 2**20


@dataclass
class StepUpdates:
    """The updates of one step."""

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


def updates_together(
    graph: Graph, program: Program, most_bytes: int | None = None
) -> dict[int, tuple[int, ...]]:
    """Return the updates of a program that can run together, where the first of them is.

    Only Frees stand between them, so that all their gradients exist before the first. Their
    workspaces, all at once, must leave the program's peak as it is, outside of an arena if it has
    one. Updates of a program with collectives, of moved tensors or on the host stay alone.

    Args:
        graph: the cost model of the program.
        program: valid.
        most_bytes: the most bytes of the gradients of those that run together; None: any number.

    Returns:
        Position of the first update → the positions of all, at least two.
    """
    if not any(operator.phase is Phase.UPDATE for operator in graph.operators):
        return {}
    if any(operator.collective is not None for operator in graph.operators):
        return {}
    used = replay(graph, program).step_bytes
    if program.offsets is not None:
        used = outside_bytes(graph, program, used)
    peak_bytes = max(used)
    moved = moved_tensors(graph, program)
    found: dict[int, tuple[int, ...]] = {}
    run: list[int] = []
    room_bytes = gradient_bytes = 0

    def close() -> None:
        if len(run) > 1:
            found[run[0]] = tuple(run)
        run.clear()

    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        sizes = None
        if isinstance(instruction, Compute):
            sizes = _sizes(graph, instruction, moved)
        if sizes is None:
            close()
            continue
        workspace_bytes, own_bytes = sizes
        full = most_bytes is not None and gradient_bytes + own_bytes > most_bytes
        if run and (full or workspace_bytes > room_bytes):
            close()
        if not run:
            room_bytes, gradient_bytes = peak_bytes - used[position] + workspace_bytes, 0
        run.append(position)
        room_bytes -= workspace_bytes
        gradient_bytes += own_bytes
    close()
    return found


def _sizes(graph: Graph, instruction: Compute, moved: frozenset[int]) -> tuple[int, int] | None:
    """Return the bytes of an update's workspace and of its gradient; None: it stays alone."""
    operator = graph.operators[instruction.op]
    chosen = variant(operator, instruction.implementation)
    if operator.phase is not Phase.UPDATE or operator.random or chosen.on_host:
        return None
    if not moved.isdisjoint((*chosen.reads, *changed_by(graph, operator))):
        return None
    own = [graph.tensors[t].size_bytes for t in chosen.reads if t not in graph.resident]
    return chosen.workspace_bytes, sum(own)

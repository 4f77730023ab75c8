"""The ordering problem (OLLA eq. 14) as plain data: tasks, the values between them, memory.

A task is one instruction that has to run; a value is one lifetime of one tensor. While a task
runs, memory is what is live before it, plus the values it produces, plus its transient bytes
(workspace, and outputs that nothing reads): the semantics of `memopt.programs.replay`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

Lists: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """One lifetime: from its producer to the last of its consumers, or to the end if kept."""

    size: int
    producer: int
    consumers: tuple[int, ...]
    kept: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks 0..n-1 in a valid order, the values between them, and further precedences.

    Attributes:
        transient: bytes needed only while the task runs.
        values: each with consumers, or kept.
        after: for each task, tasks that must precede it for reasons other than a value.
        base: bytes live throughout.
    """

    transient: tuple[int, ...]
    values: tuple[Value, ...]
    after: tuple[tuple[int, ...], ...]
    base: int = 0

    def __len__(self) -> int:
        return len(self.transient)

    @cached_property
    def produced(self) -> Lists:
        """Return the values that each task produces."""
        return _grouped(len(self), ((value.producer, i) for i, value in enumerate(self.values)))

    @cached_property
    def consumed(self) -> Lists:
        """Return the values that each task consumes."""
        values = enumerate(self.values)
        return _grouped(len(self), ((task, i) for i, value in values for task in value.consumers))

    @cached_property
    def before(self) -> Lists:
        """Return each task's immediate predecessors, ascending."""
        sets = [set(tasks) for tasks in self.after]
        for value in self.values:
            for task in value.consumers:
                sets[task].add(value.producer)
        return tuple(tuple(sorted(tasks)) for tasks in sets)

    @cached_property
    def following(self) -> Lists:
        """Return each task's immediate successors, ascending."""
        before = enumerate(self.before)
        return _grouped(len(self), ((other, task) for task, earlier in before for other in earlier))

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the values that each task produces."""
        return tuple(sum(self.values[v].size for v in values) for values in self.produced)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Return for each task the tasks that must precede it, as a bit mask (OLLA §4.1)."""
        return _reached(self.topological, self.before)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Return for each task the tasks that must follow it, as a bit mask."""
        return _reached(self.topological[::-1], self.following)

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Return some valid order: the given one if it is valid."""
        waiting = [len(tasks) for tasks in self.before]
        ready = [task for task, count in enumerate(waiting) if count == 0]
        order: list[int] = []
        while ready:
            task = heapq.heappop(ready)
            order.append(task)
            for other in self.following[task]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, other)
        if len(order) != len(self):
            raise ValueError("Tasks: the precedences have a cycle")
        return tuple(order)

    def profile(self, order: Sequence[int]) -> list[int]:
        """Return the memory while each task of a valid order runs, bytes."""
        run = Run(self)
        return [run.execute(task) for task in order]

    def peak(self, order: Sequence[int]) -> int:
        """Return the largest memory of a valid order, bytes."""
        return max(self.profile(order), default=self.base)


def _grouped(count: int, pairs: Iterable[tuple[int, int]]) -> Lists:
    """Group pairs by their first element: return the second elements, in order, of each task."""
    lists: list[list[int]] = [[] for _ in range(count)]
    for task, item in pairs:
        lists[task].append(item)
    return tuple(map(tuple, lists))


def _reached(order: Sequence[int], neighbours: Lists) -> tuple[int, ...]:
    """Return as a bit mask the tasks each one reaches; neighbours come first in `order`."""
    masks = [0] * len(order)
    for task in order:
        for other in neighbours[task]:
            masks[task] |= masks[other] | 1 << other
    return tuple(masks)


class Run:
    """Tracks memory while tasks are executed one after the other."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.live = tasks.base
        self.readers_left = [len(value.consumers) for value in tasks.values]

    def during(self, task: int) -> int:
        """Return the memory while `task` would run now."""
        return self.live + self.tasks.output_bytes[task] + self.tasks.transient[task]

    def freed(self, task: int) -> int:
        """Return the bytes that running `task` now would free."""
        values = self.tasks.values
        return sum(
            values[v].size
            for v in self.tasks.consumed[task]
            if self.readers_left[v] == 1 and not values[v].kept
        )

    def net(self, task: int) -> int:
        """Return the bytes by which running `task` now would change live memory."""
        return self.tasks.output_bytes[task] - self.freed(task)

    def execute(self, task: int) -> int:
        """Run a task; return the memory while it ran."""
        during = self.during(task)
        self.live += self.net(task)
        for value in self.tasks.consumed[task]:
            self.readers_left[value] -= 1
        return during


def members(mask: int) -> list[int]:
    """Return the tasks in a bit mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def mask_of(tasks: Iterable[int]) -> int:
    """Return the bit mask of some tasks."""
    mask = 0
    for task in tasks:
        mask |= 1 << task
    return mask

"""Exact search for an order of a window of tasks within a memory limit.

States are sets of executed tasks. From a state, a safe move (a ready task that does not raise
what is live and fits) is always right, so it is the only successor; otherwise every ready task
that fits is tried, least growth first, and states that failed are remembered. The number of
states is limited; a search that ends without reaching the limit is a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memopt.passes.order.tasks import Tasks


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The result of a search. order: one within the limit, or None; proved: no such order exists;
    states: states visited."""

    order: tuple[int, ...] | None
    proved: bool
    states: int


class Window:
    """A contiguous part of an order, its tasks to be permuted; the rest stays as it is."""

    def __init__(self, tasks: Tasks, prefix: Sequence[int], window: Sequence[int]) -> None:
        self.window = tuple(window)
        inside = {task: i for i, task in enumerate(self.window)}
        executed = set(prefix)
        values = tasks.values
        self.live = tasks.base
        self.consumed: list[list[tuple[int, int]]] = [[] for _ in window]
        """For each task: (value's number, size) of values that die within the window."""
        self.output = [tasks.output_bytes[task] for task in window]
        self.transient = [tasks.transient[task] for task in window]
        self.readers: list[int] = []
        """For each value that dies within the window: the bit mask of its readers in it."""
        for value in values:
            if value.producer not in executed and value.producer not in inside:
                continue
            later = [c for c in value.consumers if c not in executed]
            if value.producer in executed and (later or value.kept):
                self.live += value.size
            if value.kept or not later or any(c not in inside for c in later):
                continue
            for consumer in later:
                self.consumed[inside[consumer]].append((len(self.readers), value.size))
            self.readers.append(sum(1 << inside[c] for c in later))
        self.before = [
            sum(1 << inside[other] for other in tasks.before[task] if other in inside)
            for task in self.window
        ]
        self.after = [
            [inside[other] for other in tasks.following[task] if other in inside]
            for task in self.window
        ]

    def _net(self, task: int, done: int) -> int:
        net = self.output[task]
        for value, size in self.consumed[task]:
            if self.readers[value] & ~done == 1 << task:
                net -= size
        return net

    def search(
        self, limit: int, max_states: int, stop: Callable[[], bool] = lambda: False
    ) -> WindowResult:
        """Look for an order whose memory never exceeds `limit` bytes."""
        everyone = (1 << len(self.window)) - 1
        failed: set[int] = set()
        ready = sum(1 << i for i, mask in enumerate(self.before) if mask == 0)
        # One entry per decision: (done, live, ready, length of the order, choices left).
        stack: list[tuple[int, int, int, int, list[int]]] = []
        order: list[int] = []
        done, live, states = 0, self.live, 0
        while True:
            done, live, ready, fits = self._safe_moves(done, live, ready, limit, order)
            if done == everyone:
                return WindowResult(tuple(self.window[i] for i in order), True, states)
            if done not in failed:
                states += 1
                # Marked as failed at once: reaching it by another way is no better.
                failed.add(done)
                fits.sort(reverse=True)
                stack.append((done, live, ready, len(order), [task for _, _, task in fits]))
            while stack and not stack[-1][4]:
                stack.pop()
            if not stack:
                return WindowResult(None, True, states)
            if states >= max_states or (states % 256 == 0 and stop()):
                return WindowResult(None, False, states)
            done, live, ready, length, choices = stack[-1]
            task = choices.pop()
            del order[length:]
            live += self._net(task, done)
            done |= 1 << task
            ready = self._ready_after(task, done, ready)
            order.append(task)

    def _safe_moves(
        self, done: int, live: int, ready: int, limit: int, order: list[int]
    ) -> tuple[int, int, int, list[tuple[int, int, int]]]:
        """Make all safe moves; return the state and the ready tasks that fit."""
        while True:
            fits = []
            left = ready
            moved = False
            while left:
                bit = left & -left
                left ^= bit
                task = bit.bit_length() - 1
                during = live + self.output[task] + self.transient[task]
                if during > limit:
                    continue
                net = self._net(task, done)
                if net <= 0:
                    live += net
                    done |= bit
                    ready = self._ready_after(task, done, ready)
                    order.append(task)
                    moved = True
                    break
                fits.append((net, during, task))
            if not moved:
                return done, live, ready, fits

    def _ready_after(self, task: int, done: int, ready: int) -> int:
        ready &= ~(1 << task)
        for other in self.after[task]:
            if self.before[other] & ~done == 0:
                ready |= 1 << other
        return ready

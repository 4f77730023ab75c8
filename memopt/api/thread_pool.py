"""Tasks in threads side by side, with one progress report and one interrupt for all of them.

Threads, not processes: the solvers' kernels run without Python's global lock, tables that answer
several budgets are shared, and a user's script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from memopt.models.progress import Progress

T = TypeVar("T")
Task = Callable[[Progress], T]
"""A function of a progress callback, which raises KeyboardInterrupt to stop the task."""

MOST_WORKERS = 4
"""Threads by default at most, since every solve may hold tables of its own."""
GRACE_S = 5.0
"""How long an interrupted run waits for solves that report no progress."""
_POLL_S = 0.1


def default_workers() -> int:
    """Return the number of cores that this process may use, at most MOST_WORKERS."""
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return max(1, min(cores, MOST_WORKERS))


@dataclass
class Finished(Generic[T]):
    """The results of tasks, by task number; `complete` is False if an interrupt left some out."""

    results: dict[int, T] = field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True)
class _Event(Generic[T]):
    """A worker's message: a task's progress, result or error, or that the worker has left."""

    task: int
    fraction: float = 0.0
    what: str = ""
    result: tuple[T] | None = None
    error: BaseException | None = None
    left: bool = False


def run_all(tasks: Sequence[Task[T]], workers: int, progress: Progress) -> Finished[T]:
    """Run tasks in order, `workers` at a time; `progress` is called in the calling thread.

    Ctrl-C, or a KeyboardInterrupt that `progress` raises, stops the tasks at their next report
    and returns what is done. A result that a task returns despite the interrupt counts as done.

    Raises:
        Whatever a task raises, after the others have stopped.
    """
    run = _TaskRun(tasks, progress)
    threads = [
        threading.Thread(target=run.work, name=f"memopt-{number}", daemon=True)
        for number in range(min(workers, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    return run.gather(len(threads))


class _TaskRun(Generic[T]):
    """One call of `run_all`."""

    def __init__(self, tasks: Sequence[Task[T]], progress: Progress) -> None:
        self.tasks, self.progress = tasks, progress
        self.waiting: SimpleQueue[int] = SimpleQueue()
        for number in range(len(tasks)):
            self.waiting.put(number)
        self.events: SimpleQueue[_Event[T]] = SimpleQueue()
        self.stop = threading.Event()
        self.fractions = [0.0] * len(tasks)

    def work(self) -> None:
        """Run tasks, as one worker, until none is left or all are to stop."""
        while not self.stop.is_set():
            try:
                number = self.waiting.get_nowait()
            except Empty:
                break
            try:
                self.events.put(_Event(number, result=(self.tasks[number](self._report(number)),)))
            except BaseException as error:  # noqa: BLE001  (the calling thread raises it)
                self.events.put(_Event(number, error=error))
        self.events.put(_Event(-1, left=True))

    def _report(self, number: int) -> Progress:
        def report(fraction: float, what: str) -> None:
            if self.stop.is_set():
                raise KeyboardInterrupt
            self.events.put(_Event(number, fraction, what))

        return report

    def gather(self, workers: int) -> Finished[T]:
        """Collect the workers' results and reports until all have left."""
        finished: Finished[T] = Finished()
        failed: BaseException | None = None
        waited_s = 0.0
        while workers and waited_s < GRACE_S:
            try:
                event = self.events.get(timeout=_POLL_S)
                workers -= event.left
                if event.result is not None:
                    finished.results[event.task] = event.result[0]
                    self._tell(event.task, 1.0, "")
                elif event.error is not None:
                    failed = failed or event.error
                    self.stop.set()
                elif not event.left:
                    self._tell(event.task, event.fraction, event.what)
            except Empty:
                waited_s += _POLL_S if self.stop.is_set() else 0.0
            except KeyboardInterrupt:
                # A second Ctrl-C ends the waiting.
                waited_s = GRACE_S if self.stop.is_set() else 0.0
                self.stop.set()
        if failed is not None and not isinstance(failed, KeyboardInterrupt):
            raise failed
        finished.complete = len(finished.results) == len(self.tasks)
        return finished

    def _tell(self, number: int, fraction: float, what: str) -> None:
        self.fractions[number] = max(self.fractions[number], fraction)
        if what and not self.stop.is_set():
            self.progress(sum(self.fractions) / len(self.tasks), what)

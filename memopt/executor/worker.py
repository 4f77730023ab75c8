"""A thread that runs one task after the other, for copies beside the computation.

A pool of `concurrent.futures` takes several locks per task and notes its threads after it has
started them: Ctrl-C in between leaves a pool that waits for ever, or a process that does not end.
Here a task costs one atomic put, and a started thread that was not noted does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from memopt.models.locks import Forked


class Task:
    """A call that a worker makes."""

    def __init__(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._call: Callable[[], None] | None = lambda: call(*arguments)
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()
        self.done = False
        self.failed = False

    def run(self) -> None:
        """Make the call, on the worker's thread."""
        call, self._call = self._call, None
        try:
            assert call is not None
            call()
        except BaseException as error:  # noqa: BLE001  # raised again where the task is waited for
            # Its traceback holds this frame, which holds the task.
            self._error = error.with_traceback(None)
            self.failed = True
        finally:
            del call
            self.done = True
            self._running.release()

    def wait(self) -> None:
        """Wait until the call is over."""
        if not self.done:
            self._running.acquire()
            self._running.release()

    def result(self) -> None:
        """Wait, and raise what the call raised."""
        self.wait()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            # As above: the traceback holds this frame.
            del error


class Worker(Forked):
    """One thread and its tasks. The thread begins with the first task and ends with the worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.in_child()
        super().__init__()

    def before_fork(self) -> None:
        """Let all tasks end: the child does not get the thread."""
        self.settle()

    def in_child(self) -> None:
        """Begin without a thread and without tasks."""
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def submit(self, call: Callable[..., None], *arguments: Any) -> Task:
        """Let the thread call `call(*arguments)` after earlier tasks."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=self._name, daemon=True
            )
            self._thread.start()
        task = Task(call, arguments)
        self._tasks.put(task)
        self._last = task
        return task

    def settle(self) -> None:
        """Wait until all tasks are over; their errors are raised where they are waited for."""
        last = self._last
        if last is not None:
            last.wait()

    def __del__(self) -> None:
        self._tasks.put(None)


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task.run()
        del task

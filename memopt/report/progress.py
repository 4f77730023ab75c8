"""Progress on a terminal: one bar that disappears at the end, or the user's own callback."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from memopt.models.options import check_flags
from memopt.models.progress import Progress


@contextmanager
def reporting(progress: bool | Progress) -> Iterator[Progress]:
    """Yield a progress callback: the user's, one for a rich bar on a terminal's stderr, or none."""
    if callable(progress):
        yield progress
        return
    check_flags(progress=progress)
    if not progress or not sys.stderr.isatty():
        yield lambda _fraction, _what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("memopt", total=1.0)
        yield lambda fraction, what: bar.update(task, completed=fraction, description=what)


@contextmanager
def ending_at_ctrl_c(report: Progress) -> Iterator[Progress]:
    """Yield a report that raises KeyboardInterrupt once Ctrl-C was pressed, so that a solver ends
    with its best plan instead of being cut off. A second Ctrl-C raises at once.

    Changes nothing outside the main thread, or if somebody else handles the signal.
    """
    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield report
        return
    asked = threading.Event()

    def handle(_number: int, _frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    def either(fraction: float, what: str) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        report(fraction, what)

    signal.signal(signal.SIGINT, handle)
    try:
        yield either
    finally:
        signal.signal(signal.SIGINT, usual)

"""Progress on a terminal: one bar that goes away, or the user's own callback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float, str], None]


@contextmanager
def reporting(progress: bool | Progress) -> Iterator[Progress]:
    """A progress callback: the user's, a rich bar on a terminal's stderr, or nothing."""
    if callable(progress):
        yield progress
        return
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

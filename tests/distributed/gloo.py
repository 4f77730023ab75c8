"""gloo groups of one thread each.

A gloo group has two threads. torch 2.13's (`ProcessGroupGloo::runLoop`) both write the name of the
collective that they have finished into one string, without a lock; where the names are of
different lengths, the longest on the heap ("ALLGATHER_COALESCED" is), the heap is corrupted once in
some hundred thousand collectives. torch offers no option for the number of threads to
`init_process_group`: it is set where the group is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_GLOO: Any = distributed_c10d.ProcessGroupGloo


class _OneThread(type):
    """Makes groups of one thread, and is the type of any gloo group."""

    def __call__(
        cls, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
    ) -> Any:
        assert not enable_reconfigure  # torch 2.14 asks each group
        options = _GLOO._Options()
        options._devices = [_GLOO.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        return _GLOO(store, rank, size, options)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GLOO)


class OneThread(metaclass=_OneThread):
    """Stands for torch's class of gloo groups."""


def in_one_thread() -> None:
    """Give each gloo group that this process makes from now on a single thread."""
    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[assignment,misc]

"""gloo groups of one thread each.

A gloo group has two threads. torch 2.13's (`ProcessGroupGloo::runLoop`) both write the name of the
collective that they have finished into one string, without a lock; where the names are of
different lengths, the longest on the heap ("ALLGATHER_COALESCED" is), the heap is corrupted once in
some hundred thousand collectives. torch offers no option for the number of threads to
`init_process_group`: it is set where the group is made.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from memopt.step.collectives import give_way
from memopt.torch_private.tensors import holders

_GLOO: Any = distributed_c10d.ProcessGroupGloo
_OF_ENGINES = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",  # before torch 2.13
    "reduce_scatter_tensor",
)
"""What `fully_shard` calls."""


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
    """Give each gloo group that this process makes from now on a single thread, and wait until it
    has let go of what torch's engines gather and reduce. It does so a little after the collective
    has ended, now and then: meanwhile a measured peak has what nobody holds any more."""
    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[assignment,misc]
    for name in _OF_ENGINES:
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, _letting_go(getattr(torch.distributed, name)))


def _letting_go(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        storages = [one.untyped_storage() for one in given]
        before = list(map(holders, storages))
        work = collective(*args, **kwargs)
        if work is None:  # else it goes on
            give_way(lambda: all(map(operator.le, map(holders, storages), before)), 1.0)
        return work

    return called

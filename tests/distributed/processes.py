"""Running a function in several processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from tests.distributed.gloo import in_one_thread

Work = Callable[..., Any]

_PRELOADED = (
    "memopt.profiler",
    "memopt.executor.apply",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


def _one(
    rank: int,
    work: Work,
    ranks: int,
    store: str,
    folder: str,
    timeout_s: int,
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    in_one_thread()
    torch.distributed.init_process_group(
        "gloo",
        f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    begin = time.monotonic()
    try:
        found: Any = work(rank, ranks, *given)
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (told to the test)
        traceback.print_exc()
        found = Failed(type(error).__name__, str(error), time.monotonic() - begin)
    torch.save(found, f"{folder}/{rank}.pt")


class Failed:
    """What a rank raised, and after how many seconds."""

    def __init__(self, kind: str, text: str, seconds: float) -> None:
        self.kind, self.text, self.seconds = kind, text, seconds

    def __repr__(self) -> str:
        return f"{self.kind} after {self.seconds:.1f} s: {self.text}"


def run(
    work: Work, ranks: int, folder: Path, *given: Any, timeout_s: int = 120, lost: int | None = None
) -> list[Any]:
    """What `work(rank, ranks, *given)` returns, or a `Failed`, for each rank.

    Args:
        work: a function of a module.
        ranks: how many processes.
        folder: an empty one.
        given: to be pickled.
        timeout_s: the group's.
        lost: a rank that ends without a result; its place holds None.
    """
    store = str(folder / "store")
    arguments = (work, ranks, store, str(folder), timeout_s, given)
    # Processes that start with what takes seconds to import.
    multiprocessing.set_forkserver_preload([__name__, *_PRELOADED])
    context = torch.multiprocessing.start_processes(
        _one, arguments, nprocs=ranks, start_method="forkserver", join=False
    )
    assert context is not None
    for process in context.processes:
        process.join()
    found: list[Any] = []
    for rank in range(ranks):
        path = folder / f"{rank}.pt"
        if rank == lost:
            assert not path.exists()
            found.append(None)
        else:
            found.append(torch.load(path, weights_only=False))
    return found


def results(found: list[Any]) -> list[Any]:
    """What all ranks returned; fails where one raised."""
    assert not any(isinstance(one, Failed) for one in found), found
    return found

"""Running a function in several processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from tests.distributed.gloo import in_one_thread

Work = Callable[..., Any]

GRACE_S = 30
"""Beyond the group's timeout, in which a rank that waits for a lost one ends by itself."""

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
    _end(context.processes, timeout_s + GRACE_S)
    found: list[Any] = []
    for rank in range(ranks):
        path = folder / f"{rank}.pt"
        if rank != lost and not path.exists():
            found.append(Failed("NoResult", f"exit code {context.processes[rank].exitcode}", 0.0))
        elif rank == lost:
            assert not path.exists()
            found.append(None)
        else:
            found.append(torch.load(path, weights_only=False))
    return found


def _end(processes: Sequence[Any], alone_s: float) -> None:
    """Wait for all. Once one has ended the others have so many seconds: what waits for a rank that
    is gone would wait for ever in a group whose own timeout is long."""
    ended_s: float | None = None
    while any(process.is_alive() for process in processes):
        multiprocessing.connection.wait([one.sentinel for one in processes if one.is_alive()], 1.0)
        if ended_s is None and not all(process.is_alive() for process in processes):
            ended_s = time.monotonic()
        if ended_s is not None and time.monotonic() - ended_s > alone_s:
            for process in processes:
                process.kill()
    for process in processes:
        process.join()


def results(found: list[Any]) -> list[Any]:
    """What all ranks returned; fails where one raised."""
    assert not any(isinstance(one, Failed) for one in found), found
    return found

"""Ctrl-C at any moment: the best valid plan so far, with its bound."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.passes.order_and_place import order_and_place
from memopt.passes.place.buffers import Layout
from memopt.passes.place.repair import repaired_placement
from memopt.programs.liveness import store_all
from memopt.programs.validate import validate
from memopt.strategies.olla import Olla, lower_bound, place, read_buffers
from tests.passes.oracles import overlap

INSTANCE_D = Path(__file__).parents[2] / "data" / "minimalloc" / "D.1048576.csv"


@contextmanager
def ctrl_c(delay_s: float) -> Iterator[threading.Event]:
    """A real SIGINT to the main thread after so long, unless the body is done; the event tells
    whether it came."""
    sent, done = threading.Event(), threading.Event()

    def send() -> None:
        if not done.wait(delay_s):
            sent.set()
            signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield sent
    finally:
        done.set()
        sender.join()
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("delay_s", [0.02, 0.3, 1.0])
def test_a_signal_ends_the_search_for_addresses(delay_s: float) -> None:
    buffers, _ = read_buffers(INSTANCE_D)
    place(buffers[:5])
    # Too easy for local search, which is compiled before it is interrupted, too.
    repaired_placement(Layout(buffers[:5]), 2**20)
    with ctrl_c(delay_s) as sent:
        placement = place(buffers, work_limit=None)
    assert sent.is_set()
    assert placement.stats["interrupted"]
    assert lower_bound(buffers) <= placement.bound <= placement.peak
    assert overlap(buffers, dict(placement.offsets)) is None


def test_an_interrupted_order_is_placed_without_a_search() -> None:
    graph = random_graph(Random(8), 14, updates=True)
    told: list[str] = []

    def stop(_fraction: float, what: str) -> None:
        told.append(what)
        raise KeyboardInterrupt

    solution = Olla(arena_cost=None).solve(graph, None, progress=stop)
    assert told[0].startswith("ordering")
    assert solution.program is not None
    assert solution.program.offsets is not None
    assert validate(graph, solution.program, Budget(solution.peak_bytes)) is None
    assert isinstance(solution.stats["order_bound_bytes"], int)
    assert isinstance(solution.stats["arena_bound_bytes"], int)


def test_both_passes_under_a_limit_of_no_time() -> None:
    for seed in range(10):
        graph = random_graph(Random(seed), 10, updates=True)
        program, stats = order_and_place(
            graph, store_all(graph), Budget(), Device(), order=True, place=True, time_limit_s=0.0
        )
        assert validate(graph, program) is None
        assert stats["placed"]

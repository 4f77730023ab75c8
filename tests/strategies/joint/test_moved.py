"""Runs with transfers: the compiled time and memory are the replay's, and programs are valid."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.run_table import RunTable
from memopt.strategies.shared.timing import TIMINGS
from tests.brute_force.tiny_graphs import tiny_graph
from tests.models.training_graphs import overwriting

LINKS = (
    Device(to_host_bytes_per_s=3.0),
    Device(to_host_bytes_per_s=7.0, from_host_bytes_per_s=2.0, transfer_latency_s=0.5),
    Device(to_host_bytes_per_s=5.0, duplex=False),
)


def walked(rng: Random, seed: int) -> tuple[RunTable, list[np.ndarray]]:
    """A graph, and runs of it that differ from its own order by some random changes."""
    graph = tiny_graph(rng) if seed % 3 else overwriting(rng, random_graph(rng, 12))
    table = RunTable(graph)
    runs = table.runs_of(store_all(graph))
    mover = Mover(table, 2**40, LINKS[0])
    nothing = np.zeros(len(graph.tensors), dtype=np.bool_)
    found = [runs]
    for _ in range(6):
        at = Decisions(mover.used(runs), nothing, nothing)
        changes = Neighbourhood(mover, at, mover.moved(at.runs), rng).changes()
        valid = (change.runs for change in changes if mover.moved(change.runs).fits)
        runs = next(valid, runs)
        found.append(runs)
    return table, found


@pytest.mark.parametrize("seed", range(12))
def test_time_and_memory_are_those_of_the_replay(seed: int) -> None:
    rng = Random(seed)
    table, several = walked(rng, seed)
    moves = 0
    for runs in several:
        link = rng.choice(LINKS)
        mover = Mover(table, 2**40, link)
        floor, peak = mover.floor_bytes(runs), mover.moved(runs).peak_bytes
        for budget in {floor, (floor + peak) // 2, peak}:
            mover = Mover(table, budget, link)
            for timing in rng.sample(TIMINGS, 3):
                moved = mover.moved(runs, timings=(timing,))
                assert moved.fits
                program = mover.program(moved)
                timeline = replay(table.graph, program, link)
                assert validate(table.graph, program, Budget(budget)) is None
                assert timeline.time_s == pytest.approx(moved.time_s, rel=1e-12)
                assert timeline.peak_bytes <= budget
                assert timeline.host_peak_bytes == moved.host_bytes
                moves += moved.host_bytes > 0
        assert not Mover(table, floor - 1, link).moved(runs).fits
    assert moves > 0 or seed % 3


def test_without_transfers_the_peak_is_the_replays() -> None:
    for seed in range(20):
        graph = overwriting(Random(seed), random_graph(Random(seed), 8))
        table = RunTable(graph)
        mover = Mover(table, 2**40, LINKS[0])
        moved = mover.moved(table.runs_of(store_all(graph)))
        assert moved.peak_bytes == replay(graph, mover.program(moved)).peak_bytes


def test_the_hosts_limit_is_kept() -> None:
    graph = random_graph(Random(0), 10)
    table = RunTable(graph)
    runs = table.runs_of(store_all(graph))
    floor = Mover(table, 2**40, LINKS[0]).floor_bytes(runs)
    free = Mover(table, floor, LINKS[0]).moved(runs)
    assert free.host_bytes > 0
    assert not Mover(table, floor, LINKS[0], float(free.host_bytes - 1)).moved(runs).fits

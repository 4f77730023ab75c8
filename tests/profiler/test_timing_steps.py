"""Full garbage collections put off, and steps timed no more often than needed."""

from __future__ import annotations

import gc
import threading
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from memopt.api.solving import solve
from memopt.models.device import Device
from memopt.models.garbage import full_collections_deferred
from memopt.models.generate import random_chain
from memopt.step import step_time
from memopt.strategies import Solution, StoreAll


def test_full_collections_come_back() -> None:
    before = gc.get_threshold()
    with full_collections_deferred():
        inside = gc.get_threshold()
        with pytest.raises(KeyboardInterrupt), full_collections_deferred():
            raise KeyboardInterrupt
        assert gc.get_threshold() == inside
    assert inside[:2] == before[:2]
    assert inside[2] > 1000 * before[2]
    assert gc.get_threshold() == before


def test_full_collections_come_back_after_the_last_of_several_threads() -> None:
    before = gc.get_threshold()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_collections_deferred():
            entered.set()
            leave.wait(60)

    with full_collections_deferred():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
    assert gc.get_threshold()[2] > 1000 * before[2]
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ([1.5, 1.6], 2),  # long, and alike
        ([1.5, 2.0, 1.6], 3),  # long, and not alike
        ([0.5, 0.5, 0.5, 0.5], 4),
        ([0.1] * 10, 10),
        ([0.0] * 10, 10),
    ],
)
def test_a_step_is_timed_until_its_time_is_known(seconds: list[float], steps: int) -> None:
    clock = mock.Mock(side_effect=[*seconds, AssertionError("one step too many")])
    with mock.patch.object(step_time, "timed", clock):
        step_time.median_step_s(lambda: None, lambda: None, torch.device("cpu"))
    assert clock.call_count == steps


def test_solving_a_cost_model_puts_them_off() -> None:
    before, seen, plain = gc.get_threshold(), list[int](), StoreAll.solve

    def seeing(*args: Any, **how: Any) -> Solution:
        seen.append(gc.get_threshold()[2])
        return plain(*args, **how)

    with mock.patch.object(StoreAll, "solve", seeing):
        solve(random_chain(Random(1), 4), None, StoreAll(), device=Device())
    assert min(seen) > 1000 * before[2]
    assert gc.get_threshold() == before

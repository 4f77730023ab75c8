"""Full garbage collections put off, and steps timed no more often than needed."""

from __future__ import annotations

import gc
import threading
from unittest import mock

import pytest
import torch

from memopt.models.garbage import full_collections_deferred
from memopt.step import step_time


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

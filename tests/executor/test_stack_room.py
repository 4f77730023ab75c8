"""However deep the caller's stack is, a loop's calls map no memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from memopt.executor.stack_room import with_stack_room

CALLS, DEPTHS = 100, 250


def _called(depth: int) -> int:
    """Call a function whose frame has some hundred bytes, from a few frames below."""
    return depth if depth == 0 else _called(depth - 1)


def _faults(run: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _loop() -> int:
    return _faults(lambda: [_called(8) for _ in range(CALLS)])


def _at(depth: int, run: Callable[[], int]) -> int:
    return run() if depth == 0 else _at(depth - 1, run)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of a thread")
def test_a_loop_at_the_end_of_a_chunk_of_the_stack() -> None:
    """Before, every call of the loop mapped a chunk at some depths."""
    assert max(_at(depth, _loop) for depth in range(DEPTHS)) >= CALLS
    assert max(_at(depth, lambda: with_stack_room(_loop)) for depth in range(DEPTHS)) < CALLS // 4


def test_gives_what_the_call_gives_and_raises_what_it_raises() -> None:
    assert with_stack_room(lambda: 3) == 3
    with pytest.raises(KeyError):
        with_stack_room(lambda: {}[1])

"""Room on Python's stack of frames, so that calls made many times do not map memory each time.

CPython (3.11 to 3.14, `push_chunk` in Python/pystate.c) keeps frames in chunks of 16 KiB. A call
whose frame does not fit maps a new chunk, and its return unmaps that one. Where a loop happens to
stand at the end of a chunk, which depends on how deep the caller's stack is, each of its calls
costs two system calls and a page fault: the optimizer's loops over parameters took half as long
again under `python -m` as in a script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_SLOTS = 15_400
"""With what CPython adds just above 128 KiB, so that the frame's chunk has 256 KiB."""


def with_stack_room(run: Callable[[], Result]) -> Result:
    """Return `run()`, called with more than 100 KiB for the frames that it needs."""
    return run()


with_stack_room.__code__ = with_stack_room.__code__.replace(co_stacksize=_SLOTS)

"""numba's decorators with types, for the modules named *_kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import config, njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile on first call; the machine code is kept on disk."""
    return cast(Function, njit(cache=True)(function))


def compiled_unlocked(function: Function) -> Function:
    """Compile without Python's global lock, for functions that threads run side by side."""
    return cast(Function, njit(cache=True, nogil=True)(function))


def thread_count() -> int:
    """Return the number of threads that kernels are shared out to (NUMBA_NUM_THREADS).

    Kernels run in Python threads without the global lock, never under numba's own parallel
    loops: starting those sets OpenMP's thread count for the whole process, and with it torch's,
    whose results change in the last bits.
    """
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set when numba loads

"""numba's decorators with types, for the modules named *_kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile on first call; the machine code is kept on disk."""
    return cast(Function, njit(cache=True)(function))


def compiled_parallel(function: Function) -> Function:
    """The same, with prange loops shared out over the cores."""
    return cast(Function, njit(cache=True, parallel=True)(function))


def compiled_unlocked(function: Function) -> Function:
    """Compile without Python's global lock, for functions that threads run side by side."""
    return cast(Function, njit(cache=True, nogil=True)(function))

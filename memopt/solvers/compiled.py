"""numba's decorators with types, for the modules named *_kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from numba import config, njit, types

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile on first call; the machine code is kept on disk."""
    return _compiled(function)


def compiled_unlocked(function: Function) -> Function:
    """Compile without Python's global lock, for functions that threads run side by side."""
    return _compiled(function, nogil=True)


def compiled_inline(function: Function) -> Function:
    """Compile into the kernels that call it, all without Python's global lock: a call would count
    a reference to each array that it is given, which takes longer than a short function."""
    return _compiled(function, nogil=True, inline="always")


def compiled_as_numpy(function: Function) -> Function:
    """Compile with divisions by zero as in numpy: infinity or NaN, and no error."""
    return _compiled(function, error_model="numpy")


def _compiled(function: Function, **options: Any) -> Function:
    """Compile calls from other kernels once for all constants: numba compiles a function anew for
    each constant that stands in a call, as many as 35 times."""
    kernel: Any = njit(cache=True, **options)(function)
    if not hasattr(kernel, "get_call_template"):  # with NUMBA_DISABLE_JIT it is the function
        return function
    by_types: Callable[..., object] = kernel.get_call_template

    def for_all_constants(arguments: Sequence[Any], named: Mapping[str, Any]) -> object:
        plain = [_without_constant(one) for one in arguments]
        return by_types(plain, {name: _without_constant(one) for name, one in named.items()})

    kernel.get_call_template = for_all_constants
    return cast(Function, kernel)


def _without_constant(kind: Any) -> Any:
    """Return int64 for the type of the constant 3, say."""
    return types.unliteral(kind)  # type: ignore[no-untyped-call]


def thread_count() -> int:
    """Return the number of threads that kernels are shared out to (NUMBA_NUM_THREADS).

    Kernels run in Python threads without the global lock, never under numba's own parallel
    loops: starting those sets OpenMP's thread count for the whole process, and with it torch's,
    whose results change in the last bits.
    """
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # set when numba loads

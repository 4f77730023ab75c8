"""What memopt's decorators ask of numba."""

from __future__ import annotations

from typing import Any

import pytest

from memopt.solvers.compiled import compiled, compiled_as_numpy


@compiled
def _moved(start: int, by: int, back: bool) -> int:
    return start - by if back else start + by


@compiled
def _around(start: int) -> int:
    return _moved(_moved(start, 1, True), 2, back=False) + _moved(7, start, False)


@compiled
def _share(of: float) -> float:
    return 1.0 / of


@compiled_as_numpy
def _share_as_numpy(of: float) -> float:
    return 1.0 / of


def test_a_kernel_is_compiled_once_for_all_constants_in_calls() -> None:
    assert _around(10) == 28
    kernel: Any = _moved
    assert [str(types) for types in kernel.signatures] == ["(int64, int64, bool)"]


def test_only_kernels_like_numpy_divide_by_zero() -> None:
    assert _share_as_numpy(0.0) == float("inf")
    with pytest.raises(ZeroDivisionError):
        _share(0.0)

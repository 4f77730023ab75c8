"""What memopt's decorators ask of numba."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import config
from numba.core import codegen

from memopt.solvers.compiled import compiled, compiled_as_numpy


@compiled
def _share(of: float) -> float:
    return 1.0 / of


@compiled_as_numpy
def _share_as_numpy(of: float) -> float:
    return 1.0 / of


def test_a_kernel_is_compiled_once_for_all_constants_in_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))  # one that is kept asks for nothing

    def moved(start: int, by: int, back: bool) -> int:
        return start - by if back else start + by

    def around(start: int) -> int:
        there: int = kernel(kernel(start, 1, True), 2, back=False) + kernel(7, start, False)
        return there

    kernel: Any = compiled(moved)
    assert compiled(around)(10) == 28
    assert [str(types) for types in kernel.signatures] == ["(int64, int64, bool)"]


def test_only_kernels_like_numpy_divide_by_zero() -> None:
    assert _share_as_numpy(0.0) == float("inf")
    with pytest.raises(ZeroDivisionError):
        _share(0.0)


@pytest.mark.parametrize("calls_another", [False, True])
def test_ctrl_c_while_a_kernel_is_compiled(
    calls_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in a callback of LLVM, where an exception would be lost, and the code with it."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    sent: list[str] = []

    def is_kept(library: Any) -> bool:
        if sys._getframe(1).f_code.co_name == "_object_compiled_hook" and not sent:
            sent.append(library.name)
            signal.raise_signal(signal.SIGINT)
        return bool(library.__dict__.get("kept"))

    def keep(library: Any, value: bool) -> None:
        library.__dict__["kept"] = value

    kept = property(is_kept, keep)
    monkeypatch.setattr(codegen.CodeLibrary, "_object_caching_enabled", kept)

    def one_more(x: int) -> int:
        return x + 1

    def two_more(x: int) -> int:
        return kernel(kernel(x))  # type: ignore[no-any-return]

    kernel: Any = compiled(one_more)
    asked = compiled(two_more) if calls_another else kernel
    with pytest.raises(KeyboardInterrupt):
        asked(1)
    assert sent
    assert asked(1) == (3 if calls_another else 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""How faults are injected: at the k-th operator, allocation or line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.executor.arena import Arenas

PACKAGE = str(Path(memopt.__file__).parent)


class Injected(RuntimeError):
    """An error that a test causes."""


class AtOperator(TorchDispatchMode):
    """An error instead of the k-th operator; 0: none, to count them."""

    def __init__(self, number: int = 0, error: type[BaseException] = Injected) -> None:
        super().__init__()
        self.number, self.error, self.seen = number, error, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not a user's mode, inside of which planned modules run unplanned."""
        return True

    def happens(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, or fail instead."""
        self.seen += 1
        if self.seen == self.number:
            raise self.error(f"injected at {function}")
        return function(*args, **kwargs)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A model is captured with tensors without memory: nothing runs.
        traced = torch._guards.detect_fake_mode() is not None
        given = kwargs or {}
        return function(*args, **given) if traced else self.happens(function, args, given)


class AtAllocation(AtOperator):
    """Out of memory at the k-th operator that allocates its result, after it has begun."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number, torch.OutOfMemoryError)

    def happens(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        given = {*storages((args, kwargs))}
        if set(storages(result)) - given:
            self.seen += 1
            if self.seen == self.number:
                raise self.error(f"injected: no memory for the result of {function}")
        return result


def storages(values: Any) -> Iterator[int]:
    """Addresses of the memory that nested tensors have."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.untyped_storage().nbytes():
            yield value.untyped_storage().data_ptr()


class AtLine:
    """Ctrl-C, as a signal, at the k-th line that memopt, or what is in one of its folders, or the
    generated code runs; 0: none, to count them."""

    def __init__(self, number: int = 0, folder: str = PACKAGE) -> None:
        self.number, self.folder, self.seen = number, folder, 0

    def __enter__(self) -> AtLine:
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def call(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        ours = name.startswith((self.folder, "<memopt plan"))
        return self.line if ours and not _finalizing(frame) else None

    def line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.seen += 1
            if self.seen == self.number:
                signal.raise_signal(signal.SIGINT)
        return self.line


_FINALIZERS = (Arenas.keep.__code__, Arenas._drop_others.__code__)
"""What runs when an arena is dropped; the second before a step, too."""


def _finalizing(frame: FrameType | None) -> bool:
    """Whether a finalizer runs: Python itself ignores what is raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in _FINALIZERS:
            return True
        frame = frame.f_back
    return False


def failing(real: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """A function whose `at`-th call fails."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return real(*args, **kwargs)

    return called


def patch_step(
    undone: pytest.MonkeyPatch,
    optimizer: torch.optim.Optimizer,
    make: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> None:
    """Let what `make` makes of one optimizer's step run in its place: as its class's, since train
    steps refuse an optimizer with a step of its own. Others step as before."""
    real: Any = type(optimizer).step
    mine = make(partial(real, optimizer))

    def step(self: torch.optim.Optimizer, *args: Any) -> Any:
        return mine() if self is optimizer else real(self, *args)

    undone.setattr(type(optimizer), "step", step)


def error_of(run: Callable[[], object]) -> BaseException | None:
    """What a call raises, without its traceback; None: it does not fail."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001  # returned
        return error.with_traceback(None)
    return None


def fails_with(kind: type[BaseException], text: str, run: Callable[[], object]) -> None:
    """A call fails with an error of one line, which says so."""
    error = error_of(run)
    assert isinstance(error, kind), error
    assert text in str(error)
    assert "\n" not in str(error)

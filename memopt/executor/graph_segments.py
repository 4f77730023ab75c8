"""Captures a half of a step in segments: CUDA graphs, and between them what none can repeat.

A graph repeats launches and nothing else. What reads or writes values on the host, depends on
values, or rewinds the generator therefore runs between two graphs, in every replay anew: the graph
before it ends, with all copies under way joined, and another one begins after it. Generated code
says where (`Segments.run`). A step's first run in segments is its capture: each graph is launched
as soon as it is complete, so that what comes between finds values.

All graphs share one pool and are launched in the order in which they were captured, so that what a
later one takes over from an earlier one is at the same address each time. What runs between writes
its results over those of the capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memopt.errors import ExecutionError
from memopt.executor.random_state import RandomStates
from memopt.executor.swap import ThreadSwap
from memopt.executor.swap_streams import StreamSwap
from memopt.torch_private import pytree
from memopt.torch_private.modes import below_autograd
from memopt.torch_private.tensors import storage_at

Run = Callable[[], tuple[list[Any], list[Any]]]


class Capturer(Protocol):
    """Captures what is launched on a device."""

    def capture(self) -> AbstractContextManager[Callable[[], object]]:
        """Capture the block; what is given launches it again, once the block is over."""
        ...


class Segments:
    """Where a program's halves are cut, and what they do there.

    Args:
        positions: of the instructions that run between graphs.
        random: the states that repeated random operators are replayed from.
        swap: makes the program's copies; on streams they are captured.
    """

    def __init__(
        self, positions: Iterable[int], random: RandomStates, swap: StreamSwap | ThreadSwap
    ) -> None:
        self.positions = frozenset(positions)
        self._random = random
        self._transfers = swap if isinstance(swap, StreamSwap) else None
        self._capturer: Capturer | None = None
        self._steps: list[Callable[[], object]] = []
        self._open = ExitStack()
        self._join: Callable[[], None] = lambda: None

    def capture(
        self, capturer: Capturer, run: Run
    ) -> tuple[tuple[list[Any], list[Any]], Callable[[], None]]:
        """Run a half, in segments that are captured and launched. Give its results and a function
        that does the same again, into them."""
        if self._transfers is not None:
            self._transfers.make_pool()
        self._capturer, self._steps = capturer, []
        try:
            self._begin()
            results = run()
            self._end()
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise
        finally:
            self._capturer, steps = None, self._steps

        def again() -> None:
            for step in steps:
                step()

        return results, again

    def _begin(self) -> None:
        assert self._capturer is not None
        self._open = ExitStack()
        if self._transfers is not None:
            self._join = self._open.enter_context(self._transfers.captured())
        self._steps.append(self._open.enter_context(self._capturer.capture()))

    def _end(self) -> None:
        """Complete the graph under way, and launch it."""
        self._join()
        self._open.close()
        self._steps[-1]()

    def run(
        self,
        call: Callable[..., Any],
        values: tuple[Any, ...],
        state: bytearray | None,
        first: bool,
        below: bool,
    ) -> Any:
        """Run an instruction: between two graphs, if one is under way.

        Args:
            call: makes its results of its values.
            values: what it reads and, where it is given memory, writes.
            state: of the generator, where it draws numbers that are drawn again; else None.
            first: whether it draws them now: `state` is set. Else it draws them again.
            below: whether it runs below autograd.
        """
        one = _Between(call, state, first, below, self._random)
        if self._capturer is None:
            return one.made(values)
        self._end()
        result = one.made(values)
        self._steps.append(one.repeated(values, result))
        self._begin()
        return result


@dataclass(frozen=True)
class _Between:
    """An instruction that runs between two graphs; attributes as `Segments.run`'s arguments."""

    call: Callable[..., Any]
    state: bytearray | None
    first: bool
    below: bool
    random: RandomStates

    def made(self, values: Iterable[Any]) -> Any:
        """Run it."""
        with self.random.lock:
            if self.state is None:
                return self.call(*values)
            if self.first:
                self.state[:] = self.random.save()
                return self.call(*values)
            with self.random.replay(self.state):
                return self.call(*values)

    def repeated(self, values: tuple[Any, ...], result: Any) -> Callable[[], None]:
        """Return a function that runs it again and writes its results over `result`."""
        given = [_without_owning(value) for value in values]
        addresses = {_memory(value) for value in values if isinstance(value, torch.Tensor)}
        # Its own results stay; what it was given belongs to the step.
        there = [
            _without_owning(one)
            if isinstance(one, torch.Tensor) and _memory(one) in addresses
            else one
            for one in pytree.tree_leaves(result)
        ]

        def again() -> None:
            with torch.no_grad(), below_autograd() if self.below else nullcontext():
                fresh = pytree.tree_leaves(self.made(given))
                for one, now in zip(there, fresh, strict=True):
                    _write(one, now)

        return again


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _without_owning(value: Any) -> Any:
    """Return a tensor over the memory of a device's tensor, which the graphs' pool or the step
    keeps; other values as they are."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not plain or value.device.type == "cpu" or value.is_conj() or value.is_neg():
        return value
    storage = value.untyped_storage()
    there = storage_at(storage.data_ptr(), value.device, storage.nbytes())
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(there, value.storage_offset(), value.shape, value.stride())


def _write(there: Any, now: Any) -> None:
    """Write a result over that of the capture, which the next graph reads.

    Raises:
        ExecutionError: it is no tensor of that shape.
    """
    if isinstance(there, torch.Tensor) and isinstance(now, torch.Tensor):
        if (there.shape, there.dtype, there.device) == (now.shape, now.dtype, now.device):
            if there.data_ptr() != now.data_ptr():
                there.copy_(now)
            return
        there, now = tuple(there.shape), tuple(now.shape)
    elif not isinstance(there, torch.Tensor) and not isinstance(now, torch.Tensor) and there == now:
        return
    raise ExecutionError(
        f"what runs between two CUDA graphs gave {now!r}, and {there!r} when they were captured, "
        "which is part of them: apply the plan without cuda_graph=True"
    )

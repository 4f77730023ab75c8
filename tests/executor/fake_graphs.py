"""A stand-in for CUDA graphs: what a capture launches is recorded, and a replay launches it again
into the same memory. On the CPU here, with the copies that worker threads make;
`tests/device/recorded_graphs.py` adds streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.executor.swap import flat
from memopt.executor.worker import Task, Worker
from memopt.step.backend import random_state_kept
from memopt.step.nodes import HOST_RESULTS
from memopt.torch_private import pytree


class CaptureError(RuntimeError):
    """A capture breaks one of CUDA's rules."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


@dataclass
class Call:
    """A kernel's call, and the results of its first run."""

    func: Any
    args: Any
    kwargs: Any
    into: Any

    def launch(self) -> None:
        """Run it again, into the same memory."""
        given = {_memory(value) for value in tensors_in((self.args, self.kwargs))}
        found = tensors_in(self.func(*self.args, **self.kwargs))
        for value, static in zip(found, tensors_in(self.into), strict=True):
            if _memory(static) not in given:
                static.copy_(value)


@dataclass
class HostCall:
    """What a worker thread is to call, with what it pops from a list."""

    func: Callable[..., None]
    args: tuple[Any, ...]

    def launch(self) -> None:
        """Call it again."""
        self.func(*[one.copy() if isinstance(one, list) else one for one in self.args])


class CallRecorder(TorchDispatchMode):
    """Runs each operator, and records what runs on a device; notes what the memory that it writes
    held before. A number that a kernel reads on the host stays what it is now; longer tensors there
    a capture does not read, unless they are pinned."""

    def __init__(self, device: torch.device, launched: Callable[[Call], object]) -> None:
        super().__init__()
        self._device, self._launched = device, launched
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: list[torch.Tensor] = []
        self._own: set[int] = set()

    def synchronize(self) -> None:
        """Wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            raise CaptureError("a capture allocates pinned memory")
        name = func.overloadpacket.__name__
        plain = func.is_view or name in ("set_", "detach", "alias") or name.startswith("empty")
        given = tensors_in((args, kwargs))
        if not plain:
            schema = func._schema.arguments
            written = [kwargs.get(one.name, args[i] if i < len(args) else None)
                       for i, one in enumerate(schema)
                       if one.alias_info is not None and one.alias_info.is_write]  # fmt: skip
            for value in tensors_in(written):
                self.note(value)
        self.synchronize()
        result = func(*args, **kwargs)
        self.synchronize()
        results = tensors_in(result)
        ours = any(value.device == self._device for value in given)
        if ours and not all(map(self._is_here, results)) and func not in HOST_RESULTS:
            raise CaptureError("a capture copies to the host")
        if name.startswith("empty"):
            self._made += results  # so that nobody else gets the memory
        if not plain and any(value.device == self._device for value in (*given, *results)):
            args, kwargs = pytree.tree_map(self._as_now, (args, kwargs))
            self._launched(Call(func, args, kwargs, result))
            own = {_memory(value) for value in given}
            self._made += [value for value in results if _memory(value) not in own]
            self._own.update(map(_memory, results))
        return result

    def note(self, value: torch.Tensor) -> None:
        """Keep what memory holds before it is written."""
        self._before.append((value, flat(value).clone()))

    def _as_now(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or self._is_here(value):
            return value
        if _memory(value) in self._own:  # on the device, if it were captured
            return value
        if value.dim():
            raise CaptureError("a capture reads the host's memory")
        return value.clone()

    def _is_here(self, value: torch.Tensor) -> bool:
        return value.device == self._device or value.is_pinned()

    def put_back(self) -> None:
        """A capture writes nothing; what it makes holds anything."""
        for value in self._made:
            if value.is_floating_point():
                value.detach().fill_(float("nan"))
        for value, before in reversed(self._before):
            flat(value).copy_(before)


class FakeGraphs:
    """Captures and replays on the CPU."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    @contextmanager
    def capture(self) -> Iterator[Callable[[], object]]:
        self.captures += 1
        calls: list[Call | HostCall] = []

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for call in calls:
                    call.launch()

        recorder = CallRecorder(torch.device("cpu"), calls.append)
        with random_state_kept([]):
            with recorder, _host_calls(recorder, calls.append):
                yield replay
            recorder.put_back()


@contextmanager
def _host_calls(recorder: CallRecorder, launched: Callable[[HostCall], object]) -> Iterator[None]:
    """Record what worker threads do, each at once as a stream's order allows."""
    submit = Worker.submit

    def recorded(worker: Worker, func: Callable[..., None], *args: Any) -> Task:
        call = HostCall(func, tuple(one.copy() if isinstance(one, list) else one for one in args))

        def first() -> None:
            for array in pytree.tree_leaves(call.args):
                if isinstance(array, np.ndarray):
                    recorder.note(torch.from_numpy(array))
            func(*args)

        launched(call)
        task = submit(worker, first)
        task.wait()
        return task

    Worker.submit = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Worker.submit = submit  # type: ignore[method-assign]

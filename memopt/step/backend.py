"""What differs between the kinds of devices that memopt runs on, in one table (BACKENDS).

Everything else asks here; docs/adding.md says how to add a row. Autocast's state, which torch keeps
for each kind of device, is named for records and messages, entered again, and switched off here.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memopt.models.record import AUTOCAST_DEVICES
from memopt.torch_private.modes import give_back_workspaces


@dataclass(frozen=True)
class Backend:
    """One kind of device.

    Attributes:
        kind: torch's name for it, `device.type`.
        dispatch_key: torch's name for its kernels.
        block_bytes: the granularity of its allocator.
        step_scalars_bytes: the loss, its gradient and the runtime's token: small tensors that every
            step holds.
        runtime: torch's module for the device, with its streams, events, allocator statistics and
            random generators; None: kernels run in host memory on the thread that calls them, and
            torch's profiler counts their memory.
        give_back_libraries: lets libraries return what they keep on the device between steps;
            None: they keep nothing there.
    """

    kind: str
    dispatch_key: str
    block_bytes: int
    step_scalars_bytes: int
    runtime: Any = None
    give_back_libraries: Callable[[], None] | None = None

    @property
    def on_host(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.runtime is None

    def synchronize(self, device: torch.device) -> None:
        """Wait until a device of this kind has done what it was given."""
        if self.runtime is not None:
            self.runtime.synchronize(device)


BACKENDS = {
    row.kind: row
    for row in (
        Backend("cpu", "CPU", block_bytes=1, step_scalars_bytes=64),
        Backend(
            "cuda",
            "CUDA",
            block_bytes=512,
            step_scalars_bytes=2048,
            runtime=torch.cuda,
            give_back_libraries=give_back_workspaces,
        ),
    )
}
LARGEST_BLOCK_BYTES = max(one.block_bytes for one in BACKENDS.values())


def backend_of(device: torch.device | str) -> Backend:
    """The kind of a device.

    Raises:
        ValueError: memopt does not run on such devices.
    """
    found = BACKENDS.get(torch.device(device).type)
    if found is None:
        raise ValueError(
            f"the model is on {str(device)!r}, and memopt measures on {' and '.join(BACKENDS)}: "
            'move it there, or plan for a device that is not here with mode="estimate" and '
            'device="H100" or another preset'
        )
    return found


def estimated_backend(block_bytes: int) -> Backend:
    """The kind of device whose rules an estimate follows, by the blocks that it counts in: the
    CPU's for single bytes, else CUDA's."""
    return BACKENDS["cuda" if block_bytes > 1 else "cpu"]


def random_state_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Context after which the random generators of the host and of these devices are what they were
    before: each time it is entered the same numbers come."""
    own = [d for d in devices if d.type in BACKENDS and not BACKENDS[d.type].on_host]
    return torch.random.fork_rng(devices=own)


def processor() -> str:
    """What the host's processor calls itself."""
    name = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{platform.machine()} {name}"


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that something takes, the device's queue emptied before and after."""
    backend = backend_of(device)
    backend.synchronize(device)
    begin = time.perf_counter()
    run()
    backend.synchronize(device)
    return time.perf_counter() - begin


def autocast_state() -> tuple[str | None, ...]:
    """The dtype of autocast on cpu and cuda as it is here and now; None: off."""
    return tuple(
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind)
        else None
        for kind in AUTOCAST_DEVICES
    )


def autocast_off() -> ExitStack:
    """A context without autocast: the casts are in the graph, so kernels run as they are, even
    where the user calls them under autocast."""
    return autocast_as((None,) * len(AUTOCAST_DEVICES))


def autocast_as(state: tuple[str | None, ...]) -> ExitStack:
    """A context with autocast as it was when `autocast_state()` said `state`."""
    stack = ExitStack()
    for kind, wanted, found in zip(AUTOCAST_DEVICES, state, autocast_state(), strict=True):
        if wanted is not None and wanted != found:
            stack.enter_context(torch.autocast(kind, getattr(torch, wanted)))
        elif wanted is None and found is not None:
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack

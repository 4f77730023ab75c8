"""One table (BACKENDS) of the kinds of devices that memopt runs on, and their differences.

All other rooms ask here; docs/adding.md says how to add a row. Torch keeps autocast's state for
each kind of device: this module reads it, enters it again, and switches it off.
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
        kind: torch's name for the kind, `device.type`.
        dispatch_key: torch's name for its kernels.
        block_bytes: the granularity of its allocator.
        step_scalars_bytes: bytes of small tensors that every step holds: the loss, its gradient and
            the runtime's token.
        runtime: torch's module for the device, with its streams, events, allocator statistics and
            random generators; None: kernels run in host memory on the thread that calls them, and
            torch's profiler counts their memory.
        cache_bytes: bytes whose writing empties its caches; 0: calls are timed as they are.
        give_back_libraries: makes libraries return the memory that they keep on the device between
            steps; None: they keep none.
    """

    kind: str
    dispatch_key: str
    block_bytes: int
    step_scalars_bytes: int
    runtime: Any = None
    cache_bytes: int = 0
    give_back_libraries: Callable[[], None] | None = None

    @property
    def on_host(self) -> bool:
        """Return whether the device's memory is the host's."""
        return self.runtime is None

    def synchronize(self, device: torch.device) -> None:
        """Wait until a device of this kind has finished its queued work."""
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
            cache_bytes=2**28,
            give_back_libraries=give_back_workspaces,
        ),
    )
}
LARGEST_BLOCK_BYTES = max(one.block_bytes for one in BACKENDS.values())


def backend_of(device: torch.device | str) -> Backend:
    """Return the kind of a device.

    Raises:
        ValueError: memopt does not run on this kind.
    """
    found = BACKENDS.get(torch.device(device).type)
    if found is None:
        raise ValueError(
            f"the model is on {str(device)!r}, and memopt measures on {' and '.join(BACKENDS)}: "
            'move it there, or plan for a device that is not here with mode="estimate" and '
            'device="H100" or another preset'
        )
    return found


def is_on_host(value: torch.Tensor, device: torch.device | None) -> bool:
    """Return whether a (fake) tensor of a model on an accelerator is in the host's memory, where it
    takes none of the device's and never moves."""
    return device is not None and device.type != "cpu" and value.device.type == "cpu"


def estimated_backend(block_bytes: int) -> Backend:
    """Return the kind of device whose rules an estimate follows, from its block size: the CPU for
    single bytes, else CUDA."""
    return BACKENDS["cuda" if block_bytes > 1 else "cpu"]


def random_state_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Make a context that restores the random generators of the host and of these devices at its
    end, so that each entry draws the same numbers."""
    own = [d for d in devices if d.type in BACKENDS and not BACKENDS[d.type].on_host]
    stack = ExitStack()
    for kind in sorted({d.type for d in own}) or ["cuda"]:  # without any, the host's alone
        numbers = [d for d in own if d.type == kind]
        stack.enter_context(torch.random.fork_rng(devices=numbers, device_type=kind))
    return stack


def processor() -> str:
    """Return the name of the host's processor."""
    name = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{platform.machine()} {name}"


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, with the device's queue emptied before and after."""
    backend = backend_of(device)
    backend.synchronize(device)
    begin = time.perf_counter()
    run()
    backend.synchronize(device)
    return time.perf_counter() - begin


def autocast_state() -> tuple[str | None, ...]:
    """Return autocast's present dtypes on cpu and cuda; None: off."""
    return tuple(
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind)
        else None
        for kind in AUTOCAST_DEVICES
    )


def autocast_off() -> ExitStack:
    """Make a context without autocast: the casts are in the graph, so that kernels run as they are
    even if the user calls them under autocast."""
    return autocast_as((None,) * len(AUTOCAST_DEVICES))


def autocast_as(state: tuple[str | None, ...]) -> ExitStack:
    """Make a context with autocast as in a `state` that `autocast_state()` returned."""
    stack = ExitStack()
    for kind, wanted, found in zip(AUTOCAST_DEVICES, state, autocast_state(), strict=True):
        if wanted is not None and wanted != found:
            stack.enter_context(torch.autocast(kind, getattr(torch, wanted)))
        elif wanted is None and found is not None:
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack

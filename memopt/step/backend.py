"""One table (BACKENDS) of the kinds of devices that memopt runs on, and their differences.

All other rooms ask here; docs/adding.md says how to add a row. Torch keeps autocast's state for
each kind of device: this module reads it, enters it again, and switches it off.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memopt.step.accelerator import Accelerator, accelerator_kind
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
        on_host: whether its memory is the host's and kernels run on the thread that calls them;
            torch's profiler then counts their memory.
        copies: whether memory of its own, streams and pinned memory make it useful to move tensors
            to the host.
        cache_bytes: bytes whose writing empties its caches; 0: calls are timed as they are.
        register_host, unregister_host: pin memory of the host that lies at an address, with so many
            bytes, and end that; None: only torch's own allocator pins memory.
        give_back_libraries: makes libraries return the memory that they keep on the device between
            steps; None: they keep none.
    """

    kind: str
    dispatch_key: str
    block_bytes: int
    step_scalars_bytes: int
    on_host: bool = False
    copies: bool = True
    cache_bytes: int = 0
    register_host: Callable[[int, int], object] | None = None
    unregister_host: Callable[[int], object] | None = None
    give_back_libraries: Callable[[], None] | None = None

    @functools.cached_property
    def runtime(self) -> Any:
        """Its streams, events, allocator statistics and random generators, an `Accelerator`; None
        on the host."""
        return None if self.on_host else Accelerator(self.kind)

    def synchronize(self, device: torch.device) -> None:
        """Wait until a device of this kind has finished its queued work."""
        if self.runtime is not None:
            self.runtime.synchronize(device)


def _register_host(address: int, size_bytes: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, size_bytes, 0)))


def _unregister_host(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))


BACKENDS = {
    row.kind: row
    for row in (
        Backend("cpu", "CPU", block_bytes=1, step_scalars_bytes=64, on_host=True),
        Backend(
            "cuda",
            "CUDA",
            512,
            2048,
            cache_bytes=2**28,
            register_host=_register_host,
            unregister_host=_unregister_host,
            give_back_libraries=give_back_workspaces,
        ),
        Backend("xpu", "XPU", 512, 2048),
        Backend("npu", "PrivateUse1", 512, 2048),
        Backend("mps", "MPS", 256, 1024, copies=False),
    )
}
LARGEST_BLOCK_BYTES = max(one.block_bytes for one in BACKENDS.values())


def backend_of(device: torch.device | str) -> Backend:
    """Return the kind of a device.

    Raises:
        ValueError: memopt does not run on this kind.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found = BACKENDS.get(kind)
    if found is None:
        raise ValueError(
            f"the model is on {str(device)!r}, and memopt measures on {', '.join(BACKENDS)}: "
            'move it there, or plan for a device that is not here with mode="estimate" and '
            'device="H100" or another preset'
        )
    return found


def estimated_backend(block_bytes: int, kind: str = "") -> Backend:
    """Return the kind of device whose rules an estimate follows: that of a `Device`, or, where it
    names none, from its block size: the CPU for single bytes, else CUDA."""
    return backend_of(kind or ("cuda" if block_bytes > 1 else "cpu"))


def is_on_host(value: torch.Tensor, device: torch.device | None) -> bool:
    """Return whether a (fake) tensor of a model on an accelerator is in the host's memory, where it
    takes none of the device's and never moves."""
    return device is not None and device.type != "cpu" and value.device.type == "cpu"


def random_state_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Make a context that restores the random generators of the host and of these devices at its
    end, so that each entry draws the same numbers."""
    own = [d for d in devices if d.type in BACKENDS and not BACKENDS[d.type].on_host]
    kind = own[0].type if own else "cuda"  # a machine has one kind; of none, the host's alone
    return torch.random.fork_rng(devices=own, device_type=kind)


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
    """Return autocast's present dtypes on the CPU and on this machine's accelerator (without one:
    on CUDA); None: off."""
    return tuple(
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind)
        else None
        for kind in _autocast_kinds()
    )


@functools.cache
def _autocast_kinds() -> tuple[str, str]:
    return "cpu", accelerator_kind() or "cuda"


def autocast_off() -> ExitStack:
    """Make a context without autocast: the casts are in the graph, so that kernels run as they are
    even if the user calls them under autocast."""
    return autocast_as((None, None))


def autocast_as(state: tuple[str | None, ...]) -> ExitStack:
    """Make a context with autocast as in a `state` that `autocast_state()` returned."""
    stack = ExitStack()
    for kind, wanted, found in zip(_autocast_kinds(), state, autocast_state(), strict=True):
        if wanted is not None and wanted != found:
            stack.enter_context(torch.autocast(kind, getattr(torch, wanted)))
        elif wanted is None and found is not None:
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack

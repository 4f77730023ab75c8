"""A fake accelerator: `torch.device("fake:0")` and `"fake:1"`, asynchronous as a GPU is.

Its memory cannot be touched by the host (that ends the process), its allocator is stream-ordered,
has a limit and statistics and poisons what is freed, each stream is a thread, and every operator is
queued. `tests/device/conftest.py` runs tests on it in an interpreter of their own, since a process
that has loaded it has it in every test. It is loaded at the first use of one of these:

    mod: torch's module for it, as `torch.cuda` is CUDA's (also `torch.fake`).
    delay(us, side_us=None): each queued piece of work is held up for a random time, up to twice
        this; on streams other than the default ones, up to twice `side_us`; 0: not at all.
    lag(device, stream_id, us): one stream is held up by this before each piece of work.
    poison(on): whether freed memory is overwritten, in the order of its stream.
    limit(device, bytes): what the allocator gives in all; 0: all there is.
    fail_in(device, count): the allocation of that number, from now on, fails; 0: none does.
    pinned(): bytes of pinned host memory (now, at the peak), as rounded; `reset_pinned_peak()`.
    register_host(address, bytes), unregister_host(address): as cudaHostRegister.
    counts(): pieces of work queued; operators that had to run synchronously; times that the host
        waited; how often each operator ran synchronously.
    recorded(): how often a block was marked as used by another stream (`record_stream`).
    generator(device): a device's default generator.
"""

from __future__ import annotations

from typing import Any

KIND = "fake"
OWN = (
    "delay",
    "lag",
    "poison",
    "limit",
    "fail_in",
    "pinned",
    "reset_pinned_peak",
    "register_host",
    "unregister_host",
    "counts",
    "recorded",
    "generator",
)
_loaded: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name not in (*OWN, "mod"):
        raise AttributeError(f"the fake accelerator has no {name!r}")
    if not _loaded:
        from tests.device.accelerator.device_module import load

        _loaded.update(load())
    return _loaded[name]

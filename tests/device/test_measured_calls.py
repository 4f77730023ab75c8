"""How a device's kernels are timed: in a busy queue, with cold operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.pricing import device_measure, device_probes
from memopt.pricing.measure import _sample
from memopt.step.accelerator import Accelerator
from memopt.step.backend import BACKENDS
from memopt.step.signature import StandIns, call_signature


class Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("zero_", "mm", "add", "threshold_backward"):
            self.calls.append((name, args[0].data_ptr()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def noted(number: int, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What is called on a device whose caches have a size, and on which stream that is timed."""
    found = Noted()

    class Runtime(Accelerator):
        def Event(self, enable_timing: bool = False) -> Any:
            event = super().Event(enable_timing=enable_timing)

            class Recorded:
                def record(self, stream: Any) -> None:
                    assert stream.device == torch.device(device.type, number)
                    found.calls.append(("record", 0))
                    event.record(stream)

                def __getattr__(self, name: str) -> Any:
                    return getattr(event, name)

                def elapsed_time(self, other: Any) -> float:
                    return float(event.elapsed_time(other.inner))

                inner = event

            return Recorded()

    row = replace(BACKENDS[device.type], cache_bytes=size)
    vars(row)["runtime"] = Runtime(device.type)
    monkeypatch.setitem(BACKENDS, device.type, row)
    return found


@pytest.mark.parametrize("size", [32, 4096])
@pytest.mark.parametrize("number", [0, 1])
def test_calls_wait_behind_writes_and_take_turns_with_copies(
    size: int, number: int, noted: Noted, device: torch.device
) -> None:
    """Before, the queue was empty and every call read the same operands, hot in the caches."""
    device = torch.device(device.type, number)
    a = torch.empty(8, 8, device=device)
    one = call_signature(torch.ops.aten.mm.default, (a, a), {})
    with noted:
        assert _sample(one, StandIns(device), device, 10) > 0
    names = [name for name, _ in noted.calls]
    assert names == ["zero_"] * 3 + ["record"] + ["mm"] * 10 + ["record"]
    operands = [address for name, address in noted.calls if name == "mm"]
    # 512 bytes a call: alone they fill a cache of 32 bytes, eight of them do not fill 4096.
    assert len(set(operands)) == (1 if size == 32 else 8)
    assert operands[0] == operands[len(set(operands))]


@pytest.mark.parametrize(("number", "size"), [(1, 4096)])
def test_a_devices_rates_are_of_cold_caches_in_a_busy_queue(
    number: int, noted: Noted, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the queue was empty and a probe's operands were in the caches since the last run."""
    monkeypatch.setattr(device_measure, "_SQUARE", 1)
    monkeypatch.setattr(device_measure, "PROBES", ())
    monkeypatch.setattr(device_measure, "STREAM_ELEMENTS", 1)
    monkeypatch.setattr(device_probes, "_BUDGET_S", 0.01)
    device = torch.device(device.type, number)
    probes: list[tuple[Callable[[torch.device], Any], str, int]] = [
        (device_measure._rates, "mm", 1),
        (device_measure._bandwidth, "add", 16),
        (device_measure._launch, "threshold_backward", 100),
    ]
    for measured, kernel, count in probes:
        noted.calls.clear()
        with noted:
            measured(device)
        names, writes = [name for name, _ in noted.calls], 1 + count // 4
        marks = [at for at, name in enumerate(names) if name == "record"]
        for begin, end in zip(marks[::2], marks[1::2], strict=True):
            assert names[begin - writes : begin] == ["zero_"] * writes
            assert names[begin + 1 : end] == [kernel] * count
        assert names.count("zero_") == writes * len(marks) // 2 > 0

"""Torch's module for the fake accelerator, and its row in memopt's table of devices."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from memopt.step.backend import BACKENDS, Backend
from tests.device.accelerator import KIND, OWN, build

CHILD = "MEMOPT_DEVICE_TESTS"
"""Set in an interpreter that may load the accelerator."""

DEVICES = 2


def load() -> dict[str, Any]:
    """Make `torch.device("fake")` work in this process.

    Returns:
        What `tests.device.accelerator` offers, by name.
    """
    if CHILD not in os.environ:
        raise RuntimeError(
            "the fake accelerator would change every test of this process: use it in a test of "
            "tests/device, which is run in an interpreter of its own, or set MEMOPT_DEVICE_TESTS=1"
        )
    own = build.load()
    torch.utils.rename_privateuse1_backend(KIND)
    module = _device_module(own)
    torch._register_device_module(KIND, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _let_parameters_move(own)
    # Its kernels are the CPU's, so that these say which operators have one of their own.
    BACKENDS[KIND] = Backend(
        KIND,
        "CPU",
        block_bytes=512,
        step_scalars_bytes=2048,
        register_host=own.register_host,
        unregister_host=own.unregister_host,
    )
    return {"mod": module, **{name: getattr(own, name) for name in OWN}}


def _let_parameters_move(own: Any) -> None:
    """Make `parameter.data = other` work between host and device, as it does for CUDA and others
    that torch knows by name; for those behind PrivateUse1 torch 2.13 refuses it."""
    usual = torch._C.TensorBase.data

    def move(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        if parameter.device.type == value.device.type:
            usual.__set__(parameter, value)  # type: ignore[attr-defined]  # a descriptor of C
        else:
            own.set_data(parameter, value)

    torch.nn.Parameter.data = property(usual.__get__, move)  # type: ignore[assignment, attr-defined]


def _index(device: Any) -> int:
    """The number of a device, given as torch's own modules take one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _OnStream:
    """A context in which a stream is the current one of its device."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self.before)


class _OnDevice:
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


def _device_module(own: Any) -> types.ModuleType:
    known = torch.accelerator
    module = types.ModuleType(f"torch.{KIND}")

    def stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(KIND, _index(device)), priority=priority)

    def event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        # A subclass of torch.Event cannot measure times in torch 2.13.
        return torch.Event(KIND, enable_timing=enable_timing)

    def seed_all(seed: int) -> None:
        for index in range(DEVICES):
            own.generator(index).manual_seed(seed)

    def by_device(function: Any) -> Any:
        return lambda device=None: function(_index(device))

    module.__dict__.update(
        Stream=stream,
        Event=event,
        stream=_OnStream,
        device=_OnDevice,
        current_stream=by_device(known.current_stream),
        default_stream=lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=20
        ),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: DEVICES,
        current_device=known.current_device_index,
        set_device=known.set_device_index,
        get_device_name=lambda device=None: "fake accelerator",
        synchronize=by_device(known.synchronize),
        memory_allocated=by_device(known.memory_allocated),
        max_memory_allocated=by_device(known.max_memory_allocated),
        memory_reserved=by_device(known.memory_reserved),
        reset_peak_memory_stats=by_device(known.reset_peak_memory_stats),
        mem_get_info=by_device(known.get_memory_info),
        empty_cache=lambda: None,
        manual_seed=lambda seed: own.generator(_index(None)).manual_seed(seed),
        manual_seed_all=seed_all,
        get_rng_state=lambda device=KIND: own.generator(_index(device)).get_state(),
        set_rng_state=lambda state, device=KIND: own.generator(_index(device)).set_state(state),
        default_generators=tuple(map(own.generator, range(DEVICES))),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module

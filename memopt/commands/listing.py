"""`memopt strategies` and `memopt device`."""

from __future__ import annotations

import math

import memopt
from memopt.commands.output import device_figures, say_json, table
from memopt.models.budget import format_bytes
from memopt.models.device import Device

THIS = "this"


def list_strategies(*, as_json: bool) -> None:
    """See `memopt.cli.strategies`."""
    known = memopt.strategies()
    if as_json:
        say_json(known)
    else:
        table(("strategy", "what it does"), known.items())


def show_devices(name: str | None, *, as_json: bool) -> None:
    """See `memopt.cli.device`.

    Raises:
        ValueError: an unknown device; lists those there are.
    """
    from memopt.models.presets import PRESETS, find_device

    if name is None:
        if as_json:
            say_json([device_figures(device) for device in PRESETS])
            return
        table(
            ("device", "memory", "link", "bandwidth", "peak"),
            [_row(device) for device in PRESETS],
        )
        return
    if name == THIS:
        from memopt.profiler.device_measure import measure_device

        device = measure_device()
    else:
        device = find_device(name)
    if as_json:
        say_json(device_figures(device))
        return
    rows = [(key, _shown(value)) for key, value in device_figures(device).items()]
    table(("figure", device.name), rows)


def _row(device: Device) -> tuple[str, ...]:
    capacity = "-" if device.capacity_bytes is None else format_bytes(device.capacity_bytes)
    peaks = device.flops_per_s
    kind = next((k for k in ("bfloat16", "float16", "float32") if k in peaks), None)
    peak = "-" if kind is None else f"{peaks[kind] / 1e12:.3g} Tflop/s {kind}"
    return (
        device.name,
        capacity,
        _rate(device.to_host_bytes_per_s),
        _rate(device.memory_bytes_per_s),
        peak,
    )


def _rate(bytes_per_s: float) -> str:
    return "-" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.4g} GB/s"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {rate:.3g}" for key, rate in value.items()) or "-"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

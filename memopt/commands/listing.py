"""`memopt strategies`, `memopt device` and `memopt version`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import typer

import memopt
from memopt.commands import options
from memopt.commands.output import device_figures, say, say_json, table, value_of
from memopt.models.budget import format_bytes
from memopt.models.device import Device
from memopt.models.presets import PRESETS, find_device

THIS = "this"


def version() -> None:
    """Print memopt's version."""
    say(memopt.__version__)


def strategies(as_json: options.Json = False) -> None:
    """List the strategies by name."""
    known = memopt.strategies()
    if as_json:
        say_json(known)
    else:
        table(("strategy", "what it does"), known.items())


def device(
    name: Annotated[str | None, typer.Argument(help="H100, A100, V100... or this.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the devices memopt knows, show one, or measure this machine (`memopt device this`)."""
    if name is None and as_json:
        say_json([device_figures(known) for known in PRESETS])
    elif name is None:
        titles = ("device", "memory", "link", "bandwidth", "peak")
        table(titles, [_row(known) for known in PRESETS])
    else:
        with value_of("device"):
            shown = memopt.measure_device() if name == THIS else find_device(name)
        figures = device_figures(shown)
        if as_json:
            say_json(figures)
        else:
            table(("figure", shown.name), [*_rows(figures)])


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for each figure; each figure of the network is a row of its own."""
    for name, value in figures.items():
        if name == "network" and isinstance(value, dict):
            yield from ((f"network: {inner}", _shown(one)) for inner, one in value.items())
        else:
            yield name, _shown(value)


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
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(map(_shown, value))
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""`memopt doctor`: what a bug report needs, and whether the installed torch is one that memopt
knows."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

import memopt
from memopt.commands import options
from memopt.commands.output import ExitCode, say, say_json, table
from memopt.models.budget import format_bytes
from memopt.models.folders import default_directory
from memopt.torch_private.report import Finding, RowState, findings
from memopt.torch_private.table import SUPPORTED

_PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "numba",
    "ortools",
    "transformers",
    "accelerate",
    "lightning",
)
_SETTINGS = ("MEMOPT_CACHE_DIR", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


def doctor(as_json: options.Json = False) -> None:
    """Print what a bug report needs, and check torch's private names; 1 if one is gone."""
    facts = dict(_facts())
    found = [*findings()]
    broken = [one for one in found if one.breaks]
    if as_json:
        say_json({"facts": facts, "names": [*map(_figures, found)], "works": not broken})
    else:
        table(("state", "torch's name", "if it is gone"), map(_row, found))
        table(("what", "found"), facts.items())
        say(_verdict(found, broken))
    if broken:
        raise typer.Exit(int(ExitCode.FAILED))


def _verdict(found: list[Finding], broken: list[Finding]) -> str:
    counts = Counter(one.state for one in found)
    said = ", ".join(f"{counts[state]} {state}" for state in RowState if counts[state])
    known = f"memopt supports torch {', '.join(SUPPORTED)}"
    if not broken:
        return f"{len(found)} names of torch: {said}; {known}"
    names = ", ".join(one.row.name for one in broken)
    return f"{len(found)} names of torch: {said}; memopt does not work without {names}; {known}"


def _row(one: Finding) -> tuple[str, str, str]:
    return str(one.state), one.row.name, one.row.effect


def _figures(one: Finding) -> dict[str, Any]:
    row = one.row
    return {
        "name": row.name,
        "state": str(one.state),
        "required": row.required,
        "effect": row.effect,
        "purpose": row.purpose,
        "versions": list(row.versions),
    }


def _facts() -> Iterator[tuple[str, str]]:
    """Describe the machine, Python and its packages."""
    yield "memopt", memopt.__version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    for name in _PACKAGES:
        yield name, _version(name)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processors", f"{here} of {os.cpu_count()}, {platform.machine()}"
    yield from _devices()
    folder = default_directory()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    yield "caches", f"{folder}: {len(sizes)} files, {format_bytes(sum(sizes))}"
    for name in _SETTINGS:
        if name in os.environ:
            yield name, os.environ[name]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """List the devices that torch computes on here."""
    import torch

    from memopt.step.accelerator import Accelerator, accelerator_kind

    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{capability}, {torch.get_num_threads()} threads"
    kind, cuda = accelerator_kind(), torch.version.cuda or "not built"
    count = torch.accelerator.device_count() if kind else 0
    yield "accelerator", f"{kind or 'none'}, {count} devices (CUDA: {cuda})"
    if kind is None:
        return
    runtime = Accelerator(kind)
    for number in range(count):
        place = torch.device(kind, number)
        _, total_bytes = runtime.mem_get_info(place)
        yield str(place), f"{runtime.get_device_name(place)}, {format_bytes(total_bytes)}"

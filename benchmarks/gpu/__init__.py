"""The day when a GPU is there: every cell of `benchmarks.gpu.cells` in a process of its own, most
valuable first, until the minutes are up; then a table of what was expected and what was found.

A dry run on the CPU, of every line but CUDA's own: `--device cpu --size tiny --rounds 1`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import astuple
from typing import Any

import torch

from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.subject import Machine, Row
from benchmarks.runner import Benchmark, OneOf, apart, named
from memopt.programs.allocator_settings import EXPANDABLE

CELL_S = 240
"""The longest that a cell may take: then it is ended."""


def _measured(given: Any, name: str) -> list[Row] | None:
    """Run a cell with expandable segments, with which CUDA's allocator counts exactly, unless the
    user has chosen other settings; None: it fails, or the time is up."""
    limit_s = min(CELL_S, given.ends - time.monotonic())
    variable, _, value = EXPANDABLE.partition("=")
    environment = {variable: os.environ.get(variable, value)}
    try:
        return apart(rows_of, given, name, limit_s=max(0.0, limit_s), **environment)
    except TimeoutError:
        reason = "took too long" if limit_s == CELL_S else "the time is up"
    except Exception as error:  # noqa: BLE001 (whatever a device does wrong)
        reason = f"{type(error).__name__}: {error}"
    print(f"{name}: {reason}", file=sys.stderr, flush=True)
    return None


def rows_of(given: Any, name: str) -> list[Row]:
    """Run a cell here."""
    return list(CELLS[name](Machine(torch.device(given.device), given.size, given.rounds)))


def _where(given: Any) -> str:
    cuda = torch.device(given.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; say --device cpu --size tiny for a dry run")
    what = torch.cuda.get_device_name(given.device) if cuda else "the CPU"
    return f"Python {platform.python_version()}, {what}, {given.size}"


BENCHMARK = Benchmark(
    row=Row,
    cases=named(tuple(CELLS)),
    measure=_measured,
    head="check | model | what | expected | found | verdict",
    line=astuple,
    summary=lambda _, given: _where(given),
    options={"device": "cuda", "size": OneOf(("paper", "tiny")), "rounds": 7, "minutes": 18.0},
    marks=lambda given: {"torch": torch.__version__, "where": _where(given)},
    prepare=lambda given: setattr(given, "ends", time.monotonic() + 60 * given.minutes),
    failures=lambda rows, _: [" | ".join(astuple(row)) for row in rows if row.verdict == "no"],
    rows_file="gpu-results.json",
)

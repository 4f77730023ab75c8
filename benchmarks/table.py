"""What tables are made of: rows kept on disk, Markdown, interleaved times, paired ratios."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from benchmarks.steps import Step, clear
from memopt.files.envelope import write_atomically
from memopt.programs.serialize import dumps, loads

MIB, GIB = 2**20, 2**30
NONE = "–"
RowT = TypeVar("RowT")
MadeT = TypeVar("MadeT")
_NUMBER = re.compile(r"\**(≤ )?[-+−]?[\d,]*\.?\d+(e-?\d+)?( ?(%|×|s|ms|us|µs|[KMGT]i?B))?\**")
_ABSENT = ("", "-", NONE, "×", "none")


class Kept(Generic[RowT]):
    """Rows by case, written to a JSON file after every `add`, so that a run cut short is taken up.

    Args:
        path: the file; its folder is made.
        row: the dataclass that a row is, of plain JSON values.
        settings: what must be alike for rows to stand in one table.
        fresh: start anew if the file's rows were measured with other settings.

    Raises:
        SystemExit: they were, and `fresh` is not set.
    """

    def __init__(
        self, path: Path, row: type[RowT], settings: dict[str, Any], *, fresh: bool = False
    ) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.rows: dict[str, list[RowT]] = {}
        if not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] == self.settings:
            self.rows = {name: [row(**one) for one in many] for name, many in found["rows"].items()}
        elif not fresh:
            raise SystemExit(
                f"{path} keeps rows measured with {found['settings']}, not {self.settings}; "
                "--fresh drops them, --resume FILE keeps this run's elsewhere"
            )

    def add(self, name: str, rows: Sequence[RowT]) -> None:
        self.rows[name] = list(rows)
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps([asdict(one) for one in many])}"
            for name, many in self.rows.items()
        )
        settings = json.dumps(self.settings)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = f'{{"settings": {settings},\n"shared": {{}},\n"rows": {{\n{lines}\n}}}}\n'
        write_atomically(self.path, text.encode())

    def ordered(self, names: Iterable[str]) -> list[RowT]:
        return [row for name in names for row in self.rows.get(name, [])]


def captured(path: Path | None, kind: type[MadeT], make: Callable[[], MadeT]) -> MadeT:
    """Read a graph, a chain or a program from its file, else make it and keep it there; None: make
    it anew."""
    if path is not None and path.exists():
        found = loads(path.read_bytes())
        if isinstance(found, kind):
            return found
    made = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dumps(made))
    return made


def by(rows: Iterable[RowT], *names: str) -> dict[Any, list[RowT]]:
    """Give rows by the attribute of that name, or by several."""
    found: dict[Any, list[RowT]] = {}
    for row in rows:
        found.setdefault(attrgetter(*names)(row), []).append(row)
    return found


def table(head: str, rows: Iterable[str | Sequence[object]]) -> str:
    """Make a Markdown table, columns of numbers to the right.

    Args:
        head: the columns' names, separated by " | ".
        rows: their cells, or text separated likewise.
    """
    names = head.split(" | ")
    lines = [
        row.split(" | ") if isinstance(row, str) else [str(cell) for cell in row] for row in rows
    ]
    bars = ["---:" if _is_numeric(column) else "---" for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (names, bars or ["---"] * len(names), *lines)
    )


def _is_numeric(column: Sequence[str]) -> bool:
    filled = [cell for cell in column if cell.strip("*") not in _ABSENT]
    return bool(filled) and all(map(_NUMBER.fullmatch, filled))


def mib(size_bytes: float, digits: int = 1) -> str:
    """Write a size in MiB, without the unit."""
    return f"{size_bytes / MIB:.{digits}f}"


def gib(size_bytes: float, digits: int = 1) -> str:
    """Write a size in GiB, without the unit."""
    return f"{size_bytes / GIB:.{digits}f}"


def percent(share: float, digits: int = 1) -> str:
    """Write a share in percent, without a minus sign before zero."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}%"


def signed(share: float | None, digits: int = 1, none: str = NONE) -> str:
    """Write an overhead in percent, with its sign."""
    return none if share is None else f"{share:+.{digits}%}"


def joined(*parts: str) -> str:
    """Join paragraphs, without the empty ones."""
    return "\n\n".join(part for part in parts if part)


def interleaved(
    model: nn.Module, steps: Mapping[str, Step], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Measure the seconds of every step, one of each in turn, so that noise hits all alike; the
    first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            clear(model)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> float:
    """Give the median over rounds of the paired ratio time(name) / time(base)."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))

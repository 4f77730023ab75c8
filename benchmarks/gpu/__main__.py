"""`python -m benchmarks.gpu [--device cuda|cpu] [--size paper|tiny] [--only WORD] [--minutes 18]`

The day when a GPU is there: every cell of `benchmarks.gpu.cells` in a process of its own, most
valuable first, until the time is up; then one table of what was expected and what was found.
Finished cells are kept in --results and not run again, unless --fresh. A dry run on the CPU, of
every line but CUDA's own: `python -m benchmarks.gpu --device cpu --size tiny`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.cells import CELLS, Row
from benchmarks.gpu.subject import Machine

CELL_S = 240
"""The longest that a cell may take: then it is ended, and said so."""


def main() -> int:
    """Run the cells and print the table; 1 if something is not as it should be."""
    options = parsed()
    device = torch.device(options.device)
    if options.cell:
        machine = Machine(device, options.size, options.rounds)
        rows = [asdict(row) for row in CELLS[options.cell](machine)]
        options.rows.write_text(json.dumps(rows), encoding="utf-8")
        return 0
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    where = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {what}, {options.size}"
    done: dict[str, list[dict[str, str]]] = {}
    if options.results.exists() and not options.fresh:
        kept = json.loads(options.results.read_text(encoding="utf-8"))
        done = kept["cells"] if kept["where"] == where else {}
    end = time.monotonic() + 60 * options.minutes
    for name in CELLS:
        if name in done or not any(word in name for word in options.only or ("",)):
            continue
        left_s = end - time.monotonic()
        if left_s < 1:
            print(f"{name}: not run, the time is up; the same command goes on here", flush=True)
            continue
        begin, used = time.monotonic(), children_s()
        rows = run_cell(name, options, min(CELL_S, left_s))
        spent = f"{time.monotonic() - begin:.0f} s, {children_s() - used:.0f} s of the processor"
        print(f"{name}: {spent}", flush=True)
        if all(row["verdict"] != "failed" for row in rows):
            done[name] = rows
            text = json.dumps({"where": where, "cells": done}, indent=1)
            options.results.write_text(text, encoding="utf-8")
        else:
            print(table(Row(**row) for row in rows), flush=True)
    found = [Row(**row) for name in CELLS for row in done.get(name, ())]
    print(f"\n{where}\n\n{table(found)}")
    missing = [name for name in CELLS if name not in done]
    print(f"\n{len(done)} of {len(CELLS)} cells; not finished: {', '.join(missing) or 'none'}")
    return int(any(row.verdict == "no" for row in found) or bool(missing))


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("tiny", "paper"), default="paper")
    parser.add_argument("--only", action="append", help="cells whose name contains it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--results", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--cell", choices=CELLS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; say --device cpu --size tiny for a dry run")
    return options


def children_s() -> float:
    """Seconds of the processor that finished cells have taken, on whatever machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_cell(name: str, options: argparse.Namespace, limit_s: float) -> list[dict[str, str]]:
    """A cell's rows, from a process of its own; one row that says so if it fails."""
    rows = options.results.with_suffix(".rows.json")
    command = [sys.executable, "-m", "benchmarks.gpu", "--cell", name, "--rows", str(rows)]
    command += ["--device", options.device, "--size", options.size, "--rounds", str(options.rounds)]
    try:
        subprocess.run(command, check=True, timeout=limit_s, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        reason = f"took longer than {limit_s:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
    else:
        found: list[dict[str, str]] = json.loads(rows.read_text(encoding="utf-8"))
        rows.unlink()
        return found
    return [asdict(Row(name, "", "the cell", "", reason, "failed"))]


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| check | model | what | expected | found | verdict |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(asdict(row).values())} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

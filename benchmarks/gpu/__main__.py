"""`python -m benchmarks gpu [--device cuda|cpu] [--size paper|tiny] [--only WORD] [--minutes 18]`

The day when a GPU is there: every cell of `benchmarks.gpu.cells` in a process of its own, most
valuable first, until the time is up; then one table of what was expected and what was found.
Finished cells are kept in --results and not run again, unless --fresh. A dry run on the CPU, of
every line but CUDA's own: `python -m benchmarks gpu --device cpu --size tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path

import torch

from benchmarks.gpu.cells import CELLS, Row
from benchmarks.gpu.subject import Machine
from benchmarks.table import Kept
from benchmarks.table import table as markdown
from memopt.programs.allocator_settings import EXPANDABLE

CELL_S = 240
"""The longest that a cell may take: then it is ended, and said so."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the cells and print the table; 1 if something is not as it should be."""
    options = parsed(words)
    device = torch.device(options.device)
    if options.cell:
        machine = Machine(device, options.size, options.rounds)
        rows = [asdict(row) for row in CELLS[options.cell](machine)]
        options.rows.write_text(json.dumps(rows), encoding="utf-8")
        return 0
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    where = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {what}, {options.size}"
    kept = Kept(options.results, Row, {"where": where}, fresh=options.fresh)
    done = kept.rows
    end = time.monotonic() + 60 * options.minutes
    for name in CELLS:
        unwanted = not any(word in name for word in options.only or ("",))
        if unwanted or (name in done and not options.fresh):
            continue
        left_s = end - time.monotonic()
        if left_s < 1:
            print(f"{name}: not run, the time is up; the same command goes on here", flush=True)
            continue
        begin, used = time.monotonic(), children_s()
        found = run_cell(name, options, min(CELL_S, left_s))
        spent = f"{time.monotonic() - begin:.0f} s, {children_s() - used:.0f} s of the processor"
        print(f"{name}: {spent}", flush=True)
        if any(row.verdict == "failed" for row in found):
            print(table(found), flush=True)
        else:
            kept.add(name, found)
    found = kept.ordered(CELLS)
    print(f"\n{where}\n\n{table(found)}")
    missing = [name for name in CELLS if name not in done]
    print(f"\n{len(done)} of {len(CELLS)} cells; not finished: {', '.join(missing) or 'none'}")
    return int(any(row.verdict == "no" for row in found) or bool(missing))


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("tiny", "paper"), default="paper")
    parser.add_argument("--only", action="append", help="cells whose name contains it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--results", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--cell", choices=CELLS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; say --device cpu --size tiny for a dry run")
    return options


def children_s() -> float:
    """Give the seconds of the processor that finished cells have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment() -> dict[str, str]:
    """Give a cell's environment: expandable segments, with which CUDA's allocator counts exactly,
    unless the user has chosen other settings."""
    name, _, value = EXPANDABLE.partition("=")
    return {name: value, **os.environ}


def run_cell(name: str, options: argparse.Namespace, limit_s: float) -> list[Row]:
    """Run a cell in a process of its own: its rows, or one that says how it fails."""
    rows = options.results.with_suffix(".rows.json")
    command = [sys.executable, "-m", "benchmarks", "gpu", "--cell", name, "--rows", str(rows)]
    command += ["--device", options.device, "--size", options.size, "--rounds", str(options.rounds)]
    try:
        subprocess.run(
            command, check=True, timeout=limit_s, capture_output=True, text=True, env=environment()
        )
    except subprocess.TimeoutExpired:
        reason = f"took longer than {limit_s:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
    else:
        found = [Row(**row) for row in json.loads(rows.read_text(encoding="utf-8"))]
        rows.unlink()
        return found
    return [Row(name, "", "the cell", "", reason, "failed")]


def table(rows: Iterable[Row]) -> str:
    """Write the rows as Markdown."""
    return markdown("check | model | what | expected | found | verdict", map(astuple, rows))


if __name__ == "__main__":
    sys.exit(main())

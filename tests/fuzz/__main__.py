"""The long fuzzing runs, which `make fuzz` does; interrupted, they go on where they ended.

    python -m tests.fuzz modules --first 0 --count 2000 --out fuzz-modules.jsonl
    python -m tests.fuzz extremes --first 0 --count 1500 --only auto --out fuzz-auto.jsonl
    python -m tests.fuzz report --out fuzz-modules.jsonl

A seed is a line of JSON of the file, appended when it is done; seeds that are there are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from tests.fuzz.compiled import fuzz_compiled
from tests.fuzz.extremes import fuzz_extremes
from tests.fuzz.loop_budgets import fuzz_budgets
from tests.fuzz.loops import fuzz_loop
from tests.fuzz.modules import fuzz_module
from tests.fuzz.plans import fuzz_plans
from tests.fuzz.values import fuzz_values
from tests.sweeps.grammar import random_module
from tests.sweeps.modules import Found, every_plan, sweep_module

REPORT = 25
"""Seeds between two lines of progress."""


def swept(seed: int) -> Found:
    """A random module under every strategy."""
    return sweep_module(seed, random_module(seed), every_plan(tuple(memopt.strategies()), 1.0))


KINDS: dict[str, Callable[[int, tuple[str, ...]], str]] = {
    "modules": lambda seed, _: fuzz_module(seed).line,
    "loops": lambda seed, _: fuzz_loop(seed).line,
    "budgets": lambda seed, _: fuzz_budgets(seed).line,
    "values": lambda seed, _: fuzz_values(seed).line,
    "compiled": lambda seed, _: fuzz_compiled(seed).line,
    "sweep": lambda seed, _: swept(seed).line,
    "plans": lambda seed, _: fuzz_plans(seed).line,
    "extremes": lambda seed, only: fuzz_extremes(seed, only).line,
}


def run(kind: str, seeds: range, out: Path, only: tuple[str, ...] = ()) -> None:
    """Append a line for each seed that has none."""
    done = {json.loads(line)["seed"] for line in _lines(out)}
    missing = [seed for seed in seeds if seed not in done]
    for number, seed in enumerate(missing, 1):
        line = KINDS[kind](seed, only)
        torch._dynamo.reset()
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if number % REPORT == 0 or json.loads(line)["wrong"]:
            sys.stderr.write(f"{kind}: {number} of {len(missing)} {json.loads(line)['wrong']}\n")


def report(out: Path) -> str:
    """Counts of a file of results, and all that is wrong."""
    total: Counter[str] = Counter()
    strategies: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    for text in _lines(out):
        row = json.loads(text)
        total["seeds"] += 1
        total["cases"] += row["cases"]
        total["programs run"] += row.get("ran", 0)
        total["seeds refused"] += row["cases"] == 0 and not row["wrong"]
        total["seeds with something wrong"] += bool(row["wrong"])
        strategies.update(row["by_strategy"])
        refused.update(row.get("refused", {}))
        wrong += [f"{row['seed']}: {' - '.join(pair)}" for pair in row["wrong"]]
    lines = [str(dict(total)), str(dict(strategies.most_common()))]
    lines += [f"{count:6d} refused: {what}" for what, count in refused.most_common(40)]
    return "\n".join([*lines, f"{len(wrong)} wrong:", *wrong])


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*KINDS, "report"])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=(), help="strategies (extremes)")
    given = parser.parse_args()
    if given.kind == "report":
        sys.stdout.write(report(given.out) + "\n")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run(given.kind, range(given.first, given.first + given.count), given.out, tuple(given.only))


if __name__ == "__main__":
    main()

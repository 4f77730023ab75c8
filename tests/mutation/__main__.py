"""`python -m tests.mutation [--sample 40] [--seed 0] [--only replay] [--results FILE]`

Mutates the validator, the replay, the bounds, the lowering and the dynamic programs, runs each
mutant against its module's tests and prints a table and the survivors. What is in FILE already is
not run again, so that a run can be ended and resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import TypeAlias

import hypothesis.stateful  # noqa: F401  # loaded here once, not by every mutant's process
import networkx  # noqa: F401
import numpy as np  # noqa: F401
import scipy.optimize  # noqa: F401
from ortools.sat.python import cp_model  # noqa: F401

from tests.layers import ROOT
from tests.mutation.equivalent import reason_of
from tests.mutation.mutants import Mutant, sampled
from tests.mutation.running import Outcome, load, passes, patch, run
from tests.mutation.targets import TARGETS, Target

Rows: TypeAlias = dict[str, dict[str, object]]
LEAST_LIMIT_S = 8
EQUAL = "equivalent"
SLOWER = 3
"""A mutant may take that many times what its module's tests take unchanged."""


def main() -> int:
    """Run what is asked for; 1 if the tests fail without any change."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, help="mutants of each module; all if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a group, or a module's last name")
    parser.add_argument("--results", type=Path, help="JSON lines, written and resumed from")
    options = parser.parse_args()
    known: Rows = {}
    if options.results is not None and options.results.exists():
        rows = map(json.loads, options.results.read_text(encoding="utf-8").splitlines())
        known = {row["mutant"]: row for row in rows}
    for target in TARGETS:
        if options.only and not {target.group, target.module.rpartition(".")[2]} & {*options.only}:
            continue
        if not _run_target(target, options, known):
            print(f"{target.module}: its tests fail without a change", file=sys.stderr)
            return 1
    print(report(known))
    return 0


def _run_target(target: Target, options: argparse.Namespace, known: Rows) -> bool:
    """Run a module's mutants, each first in a process that has its tests loaded already, and those
    that survive it again in one that loads everything anew; False if the tests fail as they are."""
    path = ROOT / target.path
    original = path.read_text(encoding="utf-8")
    mutants = sampled(path, options.sample, options.seed)
    todo = {f"{target.module} {m.operator} {m.occurrence}": m for m in mutants}
    left = {name: m for name, m in todo.items() if name not in known}
    if not left:
        return True
    with tempfile.TemporaryDirectory() as folder:
        quick = Path(folder, "quick.jsonl")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _quickly(target, original, left, quick)
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1] != 0:
            return False
        rows = [json.loads(line) for line in quick.read_text(encoding="utf-8").splitlines()]
    for name, outcome, seconds in rows:
        mutant, limit_s = left[name], int(LEAST_LIMIT_S + SLOWER * seconds)
        if outcome == Outcome.SURVIVED:
            changed = partial(load, target.module, mutant.source(original))
            outcome, seconds = run(changed, target.tests, limit_s)
        known[name] = {
            "mutant": name,
            "group": target.group,
            "module": target.module,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "change": mutant.shown(original),
        }
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name]) + "\n")
    return True


def _quickly(target: Target, original: str, left: dict[str, Mutant], results: Path) -> int:
    """Load the tests, then run them in a fork for each mutant; 1 if they fail without a change."""
    load(target.module, original)
    begin = time.process_time()
    if not passes(target.tests):
        return 1
    seconds = time.process_time() - begin
    print(f"{target.module}: {len(left)} mutants, tests take {seconds:.1f} s", flush=True)
    limit_s = int(LEAST_LIMIT_S + SLOWER * seconds)
    for name, mutant in left.items():
        changed = partial(patch, target.module, mutant.source(original))
        outcome, seconds = run(changed, target.tests, limit_s)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, outcome, seconds]) + "\n")
    return 0


def report(known: Rows) -> str:
    """The table of modules, and the survivors: why, if they compute the same."""
    counts: dict[tuple[object, object], Counter[object]] = defaultdict(Counter)
    survivors: dict[str, str | None] = {}
    for row in known.values():
        found = counts[row["group"], row["module"]]
        found[row["outcome"]] += 1
        if row["outcome"] == Outcome.SURVIVED.value:
            reason = reason_of(str(row["module"]), str(row["change"]))
            survivors[f"`{row['module']}` `{row['change']}`"] = reason
            found[EQUAL] += reason is not None
    lines = [
        "| part | module | mutants | killed | out of time | survived | of these equivalent |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    total: Counter[object] = Counter()
    for (group, module), found in counts.items():
        total += found
        figures = [found[outcome.value] for outcome in Outcome]
        cells = (group, f"`{module}`", sum(figures), *figures, found[EQUAL])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    every = sum(total[outcome.value] for outcome in Outcome)
    noticed, differ = every - total[Outcome.SURVIVED.value], every - total[EQUAL]
    lines += [
        "",
        f"{noticed} of {every} noticed ({noticed / max(1, every):.1%}), of those that differ "
        f"{noticed} of {differ} ({noticed / max(1, differ):.1%}). Survivors:",
        "",
    ]
    lines += [f"- {name}: {reason or 'NOT NOTICED'}" for name, reason in survivors.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

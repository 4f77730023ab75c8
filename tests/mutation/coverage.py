"""`python -m tests.mutation.coverage [--keep FILE] [--compiled] [PATH ...]`: the branches of the
cost model and the strategies that tests take, memopt's kernels as plain Python, the tests' own
oracles compiled. With FILE, what earlier runs have taken counts, too: parts of the tests, one after
another. With `--compiled` kernels stay compiled, and their branches are not seen: for long tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import coverage
import pytest

from tests.layers import NO_TORCH
from tests.mutation.running import load
from tests.mutation.targets import SMALL

TESTS = (
    "models",
    "brute_force",
    "rotor",
    "offload",
    "olla",
    "monet",
    "joint",
    "mutation",
    "compare",
)
CONTRACTS = ("tests/test_contract.py", "tests/test_check_strategy.py")
LEAST = 95.0


def main() -> int:
    """Run the tests and print the table; 1 if a test fails or too few branches are taken."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.coverage", description=__doc__)
    parser.add_argument("--keep", type=Path, help="what is taken is kept here, and counted again")
    parser.add_argument("--compiled", action="store_true", help="kernels are not measured")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args()
    if not options.compiled:
        load("", "")
    measured = coverage.Coverage(branch=True, source_pkgs=list(NO_TORCH), data_file=options.keep)
    if options.keep is not None and options.keep.exists():
        measured.load()
    measured.start()
    every = [*(f"tests/{name}" for name in TESTS), SMALL, *CONTRACTS]
    arguments = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *(options.paths or every)]
    failed = pytest.main(arguments)
    measured.stop()
    if options.keep is not None:
        measured.save()
    share = measured.report(skip_covered=True, show_missing=True)
    print(by_package(measured))
    return int(failed != 0 or share < LEAST)


def by_package(measured: coverage.Coverage) -> str:
    """The table of folders: statements and branches, and the share of both that tests take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "coverage.json")
        measured.json_report(outfile=str(path))
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
    there: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for name, found in files.items():
        figures, package = found["summary"], str(Path(name).parent)
        there[package] += figures["num_statements"] + figures["num_branches"]
        taken[package] += figures["covered_lines"] + figures["covered_branches"]
    there["together"], taken["together"] = there.total(), taken.total()
    lines = ["| package | statements and branches | taken |", "|---|---:|---:|"]
    lines += [f"| `{one}` | {there[one]:,} | {taken[one] / there[one]:.1%} |" for one in there]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

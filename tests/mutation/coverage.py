"""`python -m tests.mutation.coverage [--keep FILE] [--compiled] [PATH ...]`: the branches of the
cost model and the strategies that tests take, memopt's kernels as plain Python, the tests' own
oracles compiled. With FILE, what earlier runs have taken counts, too: parts of the tests, one after
another. With `--compiled` kernels stay compiled, and their branches are not seen: for long tests.
"""

from __future__ import annotations

import argparse
import sys
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
    return int(failed != 0 or share < LEAST)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.mutation.coverage [PATH ...]`: the branches of the cost model and the strategies
that tests take, memopt's kernels as plain Python and the tests' own oracles compiled."""

from __future__ import annotations

import sys

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
LEAST = 95.0


def main() -> int:
    """Run the tests and print the table; 1 if a test fails or too few branches are taken."""
    load("", "")
    measured = coverage.Coverage(branch=True, source_pkgs=list(NO_TORCH), data_file=None)
    measured.start()
    paths = sys.argv[1:] or [f"tests/{name}" for name in TESTS]
    files = (
        [SMALL, "tests/test_contract.py", "tests/test_check_strategy.py"]
        if not sys.argv[1:]
        else []
    )
    failed = pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", *paths, *files])
    measured.stop()
    share = measured.report(skip_covered=True, show_missing=True)
    return int(failed != 0 or share < LEAST)


if __name__ == "__main__":
    sys.exit(main())

"""Importing memopt and building cost models needs neither torch nor any solver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numba", "ortools", "scipy", "networkx", "matplotlib", "pandas", "transformers")

BUILD_A_CHAIN = """
from memopt import Chain, Stage
stages = [
    Stage(forward_time_s=1.0, backward_time_s=2.0, output_bytes=8, saved_bytes=16, gradient_bytes=8)
    for _ in range(3)
]
Chain(input_bytes=8, stages=stages)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import memopt",
        "import memopt.models.graph, memopt.models.chain, memopt.programs.instructions",
        "import memopt.strategies, memopt.strategies.base",
        BUILD_A_CHAIN,
    ],
)
def test_leaves_heavy_packages_alone(code: str) -> None:
    report = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "[]"

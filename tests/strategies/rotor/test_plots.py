"""The pictures draw what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memopt.report.rotor_plots import plot_schedule
from memopt.strategies.rotor import Rotor, RotorFree
from tests.strategies.rotor.chains import toy_chain


@pytest.mark.parametrize("strategy", [Rotor(), RotorFree()])
def test_a_schedule(strategy, tmp_path):
    chain = toy_chain()
    solution = strategy.solve(chain, 9000)
    axes = plot_schedule(chain, solution.steps)
    assert axes.get_xlabel() == "time (s)"
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(
        solution.time_s
    )
    axes.figure.savefig(tmp_path / "schedule.png")


SAVED = """
import hashlib, io, matplotlib
matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "memopt"
from memopt.models.instances import rotor_toy
from memopt.report.rotor_plots import plot_schedule
from memopt.strategies import Rotor
file = io.BytesIO()
axes = plot_schedule(rotor_toy(), Rotor().solve(rotor_toy(), 83_000_000).steps)
axes.figure.savefig(file, format="svg", metadata={"Date": None})
print(hashlib.sha256(file.getvalue()).hexdigest())
"""


def test_a_picture_is_the_same_in_every_process():
    found = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SAVED]
        found.add(subprocess.check_output(command, env=environment, timeout=120))
    assert len(found) == 1

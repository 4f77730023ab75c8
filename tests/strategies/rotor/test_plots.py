"""The pictures draw what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memopt.report.rotor_plots import plot_memory, plot_schedule
from memopt.report.trade_off_plots import plot_curves
from memopt.strategies.rotor import Rotor, RotorFree, Sequential
from tests.strategies.rotor.chains import toy_chain


@pytest.mark.parametrize("strategy", [Rotor(), RotorFree()])
def test_a_schedule_and_its_memory(strategy, tmp_path):
    chain = toy_chain()
    solution = strategy.solve(chain, 9000)
    axes = plot_schedule(chain, solution.steps)
    assert axes.get_xlabel() == "time (s)"
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(
        solution.time_s
    )
    axes.figure.savefig(tmp_path / "schedule.png")
    axes = plot_memory(chain, solution.steps, 9000)
    assert "MiB" in axes.get_ylabel()
    axes.figure.savefig(tmp_path / "memory.png")


def test_curves_share_an_axis(tmp_path):
    chain = toy_chain()
    strategies = (Rotor(), RotorFree(), Sequential("best"))
    curves = {strategy.name: strategy.curve(chain) for strategy in strategies}
    axes = plot_curves(curves, chain.compute_time_s)
    assert len(axes.lines) == 3
    assert min(axes.lines[0].get_ydata()) == pytest.approx(1)
    axes.figure.savefig(tmp_path / "curves.png")


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

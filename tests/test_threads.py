"""Planning leaves the process as it was: torch's thread count decides the last bits of results."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import numpy as np
import torch
import memopt
from memopt.models.instances import rotor_toy
from memopt.strategies import STRATEGIES

torch.set_num_threads(1)
device = memopt.Device(to_host_bytes_per_s=1e9)
planned = []
for strategy in STRATEGIES:
    if strategy.needs != "graph":
        memopt.plan(rotor_toy(), strategy=strategy, device=device, progress=False)
        planned.append(strategy.name)
        assert torch.get_num_threads() == 1, strategy.name
assert "rotor" in planned
"""


def test_strategies_leave_the_thread_count_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

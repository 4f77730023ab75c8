"""A strategy's solve in a process of its own, beside a training that goes on.

The process imports no torch and runs none of the user's code: it is a new interpreter, neither
forked nor started from the user's main module. It ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from memopt.models.device import Device
from memopt.programs.solution import Solution
from memopt.strategies.base import CostModel, Strategy
from memopt.strategies.target import Target

ASKED, ANSWER = "asked.pickle", "answer.pickle"
NICE = 10


@dataclass(frozen=True)
class SolveRequest:
    """The arguments of a solve; see `Strategy.solve`."""

    strategy: Strategy
    cost_model: CostModel
    budget_bytes: int | None
    device: Device
    time_limit_s: float | None

    def solution(self) -> Solution:
        """Solve here."""
        target = Target.of(self.strategy, self.cost_model)
        return target.solve(
            self.budget_bytes,
            lambda budget_bytes: self.strategy.solve(
                target.solved, budget_bytes, device=self.device, time_limit_s=self.time_limit_s
            ),
        )


class SolvedApart:
    """A solve in a process of its own.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, request: SolveRequest) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memopt-")
        folder = Path(self._folder.name)
        (folder / ASKED).write_bytes(pickle.dumps(request))
        one = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        places = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memopt.strategies.apart", self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one, "PYTHONPATH": places},
        )
        self._ends = weakref.finalize(self, _end, self._process, self._folder, os.getpid())

    @property
    def ended(self) -> bool:
        """Tell whether the process has ended."""
        return self._process.poll() is not None

    def solution(self) -> Solution | None:
        """Return the solution of a process that has ended, until it is stopped; None if it
        failed."""
        try:
            found = pickle.loads((Path(self._folder.name) / ANSWER).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            found = None
        return found if isinstance(found, Solution) else None

    def stop(self) -> None:
        """End the process, and remove its folder."""
        self._ends()


def _end(
    process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str], owner: int
) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that began it
    process.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    folder.cleanup()


def main(folder: str) -> None:
    """Solve what the parent asks for, at low priority; end at once where the parent has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICE)

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    request = pickle.loads((Path(folder) / ASKED).read_bytes())
    made, answer = Path(folder) / f"{ANSWER}.part", Path(folder) / ANSWER
    made.write_bytes(pickle.dumps(request.solution()))
    made.replace(answer)


if __name__ == "__main__":
    # By its name in the package: what is pickled belongs to that module.
    from memopt.strategies.apart import main as solve

    solve(sys.argv[1])

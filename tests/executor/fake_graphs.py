"""A stand-in for CUDA graphs: its replay runs the captured function again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.executor.cuda_graph import Run


class FakeGraphs:
    """Runs the captured function again, into the lists that the capture gave: on a device the same
    kernels would write to the same addresses."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self._again: list[Callable[[], None]] = []

    def capture(self, run: Run) -> tuple[tuple[list[Any], list[Any]], Callable[[], object]]:
        self.captures += 1
        results = run()
        # A capture launches nothing: what it leaves in the results is not there yet, and what the
        # captures before have left, over which the run here has written, still is.
        for value in results[0]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(float("nan"))
        for again in self._again:
            again()

        def launch() -> None:
            for static, fresh in zip(results, run(), strict=True):
                static[:] = fresh

        def replay() -> None:
            self.replays += 1
            launch()

        self._again.append(launch)
        return results, replay

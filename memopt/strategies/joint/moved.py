"""A program of given runs whose tensors move to the host where memory is short."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memopt.models.bounds import needed_operators
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import live_bytes
from memopt.programs.liveness import with_frees
from memopt.programs.replay import replay
from memopt.strategies.joint.layer_changes import LayerChange, layer_changes
from memopt.strategies.shared.run_table import Flags, Ints, RunTable
from memopt.strategies.shared.timing import TIMINGS, Link, Timing

NEVER = 1 << 60
"""A number of bytes above any budget."""
SMALL = 1e-3
"""Tensors below this share of the bytes that the step adds to the resident ones never move."""


def least_moved(graph: Graph, whole: Program) -> int:
    """Return the bytes below which a tensor does not move and is left out of the relaxation;
    `whole` is the unchanged step's program."""
    peak_bytes = replay(graph, whole).peak_bytes
    return max(1, int(SMALL * (peak_bytes - graph.resident_bytes)))


@dataclass(frozen=True, eq=False)
class Moved:
    """Runs with the transfers that make them fit.

    Attributes:
        runs: see `RunTable`.
        time_s: replayed time of the step; infinite: they do not fit.
        host_bytes: the peak on the host.
        events: rows (time point, kind, tensor).
        peak_bytes: memory of the runs without any transfer.
    """

    runs: Ints
    time_s: float
    host_bytes: int = 0
    events: Ints | None = None
    peak_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Tell whether there is a program within the budget."""
        return math.isfinite(self.time_s)

    @property
    def moves(self) -> bool:
        """Tell whether any tensor moves."""
        return self.events is not None and len(self.events) > 0


@dataclass(eq=False)
class Mover:
    """Places transfers so that runs fit a budget."""

    table: RunTable
    budget_bytes: int
    device: Device
    host_bytes: float = math.inf
    least_bytes: int = 1

    def __post_init__(self) -> None:
        self.arrays, self.link = self.table.arrays, Link.of(self.device)
        operators = self.table.graph.operators
        needed = needed_operators(self.table.graph)
        must = [operator.has_effects and i in needed for i, operator in enumerate(operators)]
        self.must = np.array(must, dtype=np.bool_)

    @cached_property
    def layer_changes(self) -> tuple[LayerChange, ...]:
        """Return the changes of equal layers that there can be."""
        return tuple(layer_changes(self.table))

    def moved(
        self,
        runs: Ints,
        stays: Flags | None = None,
        timings: tuple[Timing, ...] = TIMINGS[:1],
        first: Flags | None = None,
        most_s: float = math.inf,
    ) -> Moved:
        """Place transfers for runs under the best of some timings.

        Args:
            runs: those whose results nothing reads are left out.
            stays: tensors that must not move; None: every movable one may.
            timings: to try.
            first: tensors that move before any others do.
            most_s: step times from this on are of no use: such runs need not fit.
        """
        from memopt.strategies.joint import lifetime_kernels
        from memopt.strategies.shared import transfer_kernels

        v = self.arrays
        runs = self.used(runs)
        last, kept, valid = lifetime_kernels.last_uses(v, runs)
        if not valid:
            return Moved(runs, math.inf)
        time_s = float(lifetime_kernels.durations_of(v, runs).sum())
        if time_s >= most_s:
            return Moved(runs, math.inf)
        need, gaps = lifetime_kernels.memory_of(v, runs, last, kept, self.least_bytes)
        peak = int(need.max())
        best = Moved(runs, math.inf, peak_bytes=peak)
        if peak <= self.budget_bytes:
            return Moved(runs, time_s, 0, np.empty((0, 3), np.int64), peak)
        sizes = v.size_bytes[gaps[:, 0]]
        never = np.zeros(len(gaps), np.bool_) if stays is None else stays[gaps[:, 0]]
        order = gaps[:, 2].copy()
        if first is not None:
            order[first[gaps[:, 0]]] += len(runs)
        chosen, enough = transfer_kernels.chosen_gaps(
            need, gaps, sizes, self.budget_bytes, never, order
        )
        if not enough or not self.host_bytes:
            return best
        for timing in timings:
            time_s, host, events, _ = transfer_kernels.transfers(
                v, runs, need, gaps, chosen, self.budget_bytes, self.link, timing,
                min(most_s, best.time_s),
            )  # fmt: skip
            if time_s < best.time_s and host <= self.host_bytes:
                best = Moved(runs, time_s, host, events, peak)
        return best

    def thorough(self, runs: Ints) -> Moved:
        """Place transfers under the best of all timings, whatever the tensors' sizes."""
        found = self.moved(runs, timings=TIMINGS)
        return found if found.fits else replace(self, least_bytes=1).moved(runs, timings=TIMINGS)

    def used(self, runs: Ints) -> Ints:
        """Return the runs whose results are read, and those that must run."""
        from memopt.strategies.joint.lifetime_kernels import used_runs

        return used_runs(self.arrays, runs, self.must)

    def floor_bytes(self, runs: Ints, stays: Flags | None = None) -> int:
        """Return the smallest budget that these runs can meet, total bytes; NEVER if they read a
        tensor that does not exist."""
        needs = self.needs(runs, stays)
        return NEVER if needs is None else int(needs.max())

    def needs(self, runs: Ints, stays: Flags | None = None) -> Ints | None:
        """Return the memory at each time point of the used runs, total bytes, with all on the host
        that may be; None if they read a tensor that does not exist."""
        from memopt.strategies.joint import lifetime_kernels

        v = self.arrays
        runs = self.used(runs)
        last, kept, valid = lifetime_kernels.last_uses(v, runs)
        if not valid:
            return None
        need, gaps = lifetime_kernels.memory_of(v, runs, last, kept, self.least_bytes)
        if not self.host_bytes:
            return need
        if stays is not None:
            gaps = gaps[~stays[gaps[:, 0]]]
        return need - live_bytes(gaps[:, 1] + 1, gaps[:, 2], v.size_bytes[gaps[:, 0]], len(need))

    def program(self, moved: Moved) -> Program:
        """Return the program of runs that fit."""
        assert moved.events is not None
        steps = self.table.instructions(moved.runs, moved.events)
        graph = self.table.graph
        return with_in_place(graph, Program(with_frees(graph, steps)))

"""The relaxation of a step that recomputes, moves tensors to the host and chooses implementations.

MONeT's time points (`TimePointModel`), and the link. Beside d, r, b and s there are, for a forward
tensor t of some size, o(t) and i(t) the seconds of its copies to the host and back:

    h[c,t]   at time point c the host has a copy of t, all of it
    f[c,t]   t comes back between the time points c and c+1
    o[c,t]   the copy to the host ends between c-1 and c; o[0,t] = h[0,t]
    w[c]     seconds, 0 or more, beyond the runs counted: before the boundary (c = 0), between the
             time points c-1 and c, and after the last one
    T(c)     seconds until time point c: the runs before it and w[0] + ... + w[c]
Constraints, beside those of `TimePointModel`, where t is also there after point c if f[c,t]:
    f[c,t] ≤ h[c,t];  h[c,t] ≤ h[c-1,t] + o[c,t];  o[c,t] ≤ s, r, f of c-1
    to the host until c     Σ_{c' ≤ c} Σ_t o[c',t] o(t) ≤ T(c)                     → `_outward`
      ... of tensors that operators from i on make, before the boundary:
                            Σ_t h[0,t] o(t) ≤ Σ_{j ≥ i} d[j] + w[0]
    back from c on          Σ_{c' ≥ c} Σ_t f[c',t] i(t) ≤ T - T(c)                 → `_homeward`
      ... of tensors that nothing needs from point c on:
                            Σ_{c' < c} Σ_t f[c',t] i(t) ≤ T(c) - T(0)
    one way at a time       Σ o + Σ f ≤ T, for a link that is not duplex
Objective: all runs and waits. docs/strategies/joint.md proves that it bounds every program of the
class from below. Gradients and other tensors of the backward count only where they are read or are
results, since they may move, too; so do forward tensors too small to be modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from memopt.models.device import Device
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import Timeline, replay
from memopt.solvers.binary_program import Term
from memopt.strategies.joint.moved import Mover
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.run_table import Flags, Ints
from memopt.strategies.shared.time_point_search import TimePointSearch
from memopt.strategies.shared.time_points import TimePointModel
from memopt.strategies.shared.timing import TIMINGS

UNITS = 1000.0
"""Scale of the sum of a step's runs in the time rows: solvers' tolerances are absolute."""
SUFFIXES = 12
"""The most groups of forward operators with a row of their own."""


@dataclass
class LinkedModel(TimePointModel):
    """The relaxation of a graph and its link; the module's docstring has its rows.

    Attributes:
        device: link rates.
        least_bytes: forward tensors smaller than this neither move nor take memory.
    """

    device: Device = field(default_factory=Device)
    least_bytes: int = 1

    def __post_init__(self) -> None:
        self.h: list[dict[int, int]] = []
        self.f: list[dict[int, int]] = []
        self.o: list[dict[int, int]] = []
        self.unit_s = max(1e-12, self.graph.compute_time_s / UNITS)
        super().__post_init__()
        self.w = [self.model.amount(self.unit_s) for _ in range(len(self.at) + 2)]
        self._outward()
        self._homeward()

    def terms(self, held: Iterable[tuple[int, int]]) -> list[Term]:
        return [term for term in super().terms(held) if term[0] >= self.least_bytes]

    def _time_point(self, point: int) -> None:
        tensors, _ = self._needed(self._begin(point))
        movable = sorted(
            t for t in tensors - self.graph.kept if self.size[t] >= max(1, self.least_bytes)
        )
        model = self.model
        h = {t: self.tensor_variable(t, "h", point) for t in movable}
        out = {t: self.tensor_variable(t, "o", point) for t in movable} if point else h
        for t, v in h.items():
            if point:
                model.implies_any(out[t], self._sources(point - 1, t))
                earlier = [self.h[-1][t]] if t in self.h[-1] else []
                model.implies_any(v, [out[t], *earlier])
            else:
                model.implies_any(v, [self.run[j][p] for j, p in self.made[t]])
        back = {t: self.tensor_variable(t, "f", point) for t in movable}
        for t, v in back.items():
            model.implies_any(v, [h[t]])
        self.h.append(h)
        self.o.append(out)
        self.f.append(back)
        super()._time_point(point)

    def _sources(self, point: int, t: int) -> list[int]:
        back = [self.f[point][t]] if t in self.f[point] else []
        return super()._sources(point, t) + back

    def _sure(self, t: int, k: int) -> bool:
        # Other tensors may be on the host.
        return t in self.graph.kept

    def _available(self, point: int, values: tuple[bool, ...]) -> set[int]:
        back = (t for f in self.f[point:] for t, v in f.items() if values[v])
        made_later = {
            t
            for again in self.r[point:]
            for i, variables in again.items()
            for place, v in enumerate(variables)
            if values[v]
            for t in self.choices[i][place][1].writes
        }
        here = {t for t in self.f[point] if values[self.f[point][t]]}
        return super()._available(point, values) | here | (set(back) - made_later)

    def _run_terms(self, point: int) -> list[Term]:
        """Return the seconds, in units, of the runs after a time point; -1: before the boundary."""
        if point < 0:
            found = [(i, self.run[i]) for i in range(self.first)]
        else:
            end = (*self.at, self.count)[point]
            found = [(k, self.run[k]) for k in range(self._begin(point), end)]
            found += list(self.r[point].items())
        return self._seconds(found)

    def _seconds(self, runs: Iterable[tuple[int, list[int]]]) -> list[Term]:
        """Return the seconds, in units, of (operator, variables of its implementations)."""
        return [
            (choice.time_s / self.unit_s, v)
            for i, variables in runs
            for (_, choice), v in zip(self.choices[i], variables, strict=True)
        ]

    def _at_most(self, copies: list[Term], time: list[Term]) -> None:
        """Require that copies take no longer than some time."""
        if copies:
            self.model.add([*copies, *((-seconds, v) for seconds, v in time)], 0.0)

    def _times(self, begin: int, end: int) -> list[Term]:
        """Return runs and waits from time point `begin` to `end`; -1 and len(at) + 1: the ends."""
        parts = range(begin, end)
        runs = [term for part in parts for term in self._run_terms(part)]
        return runs + [(1.0, self.w[part + 1]) for part in parts]

    def _outward(self) -> None:
        seconds = {
            t: self.device.swap_out_time_s(self.size[t]) / self.unit_s for o in self.o for t in o
        }
        copies: list[Term] = []
        for point, out in enumerate(self.o):
            copies += [(seconds[t], v) for t, v in out.items()]
            self._at_most(list(copies), self._times(-1, point))
        for begin in self._suffixes():
            late = [t for t in self.h[0] if all(j >= begin for j, _ in self.made[t])]
            time = self._seconds((i, self.run[i]) for i in range(begin, self.first))
            time.append((1.0, self.w[0]))
            self._at_most([(seconds[t], self.h[0][t]) for t in late], time)

    def _suffixes(self) -> list[int]:
        """Return the forward operators at which rows for copies of their own begin."""
        return list(range(0, self.first, max(1, self.first // SUFFIXES)))

    def _homeward(self) -> None:
        def back(points: range, without: set[int]) -> list[Term]:
            return [
                (self.device.swap_in_time_s(self.size[t]) / self.unit_s, v)
                for point in points
                for t, v in self.f[point].items()
                if t not in without
            ]

        last = len(self.at) + 1
        for point in range(last):
            self._at_most(back(range(point, last), set()), self._times(point, last))
        for point in range(1, last):
            later, _ = self._needed(self._begin(point))
            self._at_most(back(range(point), later), self._times(0, point))
        if not self.device.duplex:
            out = [
                (self.device.swap_out_time_s(self.size[t]) / self.unit_s, v)
                for o in self.o
                for t, v in o.items()
            ]
            self._at_most(out + back(range(last), set()), self._times(-1, last))


@dataclass
class LinkedSearch(TimePointSearch):
    """Solves the relaxation, adding time points and slack where its program does not fit."""

    mover: Mover = field(kw_only=True)
    least_bytes: int = 1
    gap: float = 3e-3
    found: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.best = Incumbent(
            self.graph, self.budget_bytes, tolerance=0.0, device=self.mover.device
        )

    def _solved(self, slack: dict[int, int]) -> tuple[Program, Timeline] | None:
        keys = sorted(slack)
        free = tuple(slack[key] for key in keys)
        built = LinkedModel(
            self.graph,
            self.allowed,
            tuple(keys[1:]),
            free,
            device=self.mover.device,
            least_bytes=self.least_bytes,
        )
        answer = self._answer(built, self.gap)
        if not any(free):
            self.bound_s = max(self.bound_s, answer.bound)
            self.infeasible = self.infeasible or answer.status is Status.INFEASIBLE
        if not answer.values:
            return None
        moves = {t for back in built.f for t, v in back.items() if answer.values[v]}
        stays = np.array([t not in moves for t in range(len(self.graph.tensors))])
        return self._offered(built.program(answer.values), stays)

    def _offered(self, program: Program, stays: Flags) -> tuple[Program, Timeline]:
        """Offer the program with the transfers it needs. Return it with the answer's transfers,
        which may leave it over the budget."""
        runs = self.mover.table.runs_of(program)
        moved = self.mover.moved(runs, timings=TIMINGS, first=~stays)
        if moved.fits:
            self.found.append(moved.runs)
            self._offer_within(self.mover.program(moved))
        least_bytes = max(self.budget_bytes, self.mover.floor_bytes(runs, stays))
        mover = replace(self.mover, budget_bytes=least_bytes)
        moved = mover.moved(runs, stays, TIMINGS)
        # If the host has no room for these moves, return the program without them.
        program = mover.program(moved) if moved.fits else with_in_place(self.graph, program)
        return program, self._offer_within(program)

    def _offer_within(self, program: Program) -> Timeline:
        """Offer a program if the host has room for its copies."""
        timeline = replay(self.graph, program, self.mover.device)
        if timeline.host_peak_bytes <= self.mover.host_bytes:
            self.best.offer(program)
        return timeline

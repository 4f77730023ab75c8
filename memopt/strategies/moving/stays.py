"""Whole steps whose parameters and optimizer state live on the host: what to keep, when to copy.

Given a program that treats the movable tensors as resident (a *base*), every movable tensor is on
the device at least while something reads it. The room that the budget leaves has two uses. Keeping
tensors between two readers, or for the whole step, saves copies. Starting copies before their
reader needs them, and ending them after an update, hides them. What to keep is decided by bytes
saved per byte held, for several orders and shares of the room; the exact replay chooses. Not from a
paper; ZeRO-Offload (arXiv:2101.06840) and its successors move all or nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.moved import changed_by
from memopt.programs.replay import Timeline, replay
from memopt.strategies.moving.on_host import HostUpdate, without
from memopt.strategies.moving.stay import Ints, Seam, Stay, linked

RESERVES = (0.0, 0.1, 0.3, 0.6, 0.9)
"""Shares of the room that are reserved for copies under way."""
ROUNDS = 3
"""Schedules of one choice, each with the times of the previous one."""


@dataclass(frozen=True)
class RoomChoice:
    """How to spend the room.

    Attributes:
        whole_first: whether tensors are kept for the whole step before they are kept between two
            readers.
        reserve: see `RESERVES`.
        for_returns: the share of the reserve that only copies to the host may use.
        carried: the share of the room that may stay on the device from one step to the next, where
            the step is repeated.
        drops_at_once: whether a gradient's host copy is dropped with its device copy, so that the
            compute stream waits for its update on the host; else when that should be over.
    """

    whole_first: bool
    reserve: float
    for_returns: float = 0.0
    carried: float = 0.0
    drops_at_once: bool = False


CHOICES = tuple(
    RoomChoice(whole, reserve, share)
    for reserve in RESERVES
    for share in ((0.0, 0.5) if reserve else (0.0,))
    for whole in (True, False)
)


@dataclass(eq=False)
class MovedBase:
    """A base program, and the memory that it leaves.

    Attributes:
        graph: with movable tensors.
        whole: treats them as resident.
        device: link rates.
        hosted: updates that the host runs.
        program: `whole` without those.
        gradients: position of the Free of such an update's gradient → the update.
    """

    graph: Graph
    whole: Program
    device: Device
    hosted: tuple[HostUpdate, ...] = ()

    def __post_init__(self) -> None:
        self.program, self.gradients = without(self.whole, self.hosted)

    @cached_property
    def timeline(self) -> Timeline:
        """Return the base's own timeline."""
        return replay(self.graph, self.program, self.device)

    @cached_property
    def touched(self) -> dict[int, list[int]]:
        """Map movable tensors to the instructions that read them, ascending."""
        movable, found = set(self.graph.movable), dict[int, list[int]]()
        for position, run in self.program.computes:
            for tensor in dict.fromkeys(run.effects(self.graph).reads):
                if tensor in movable:
                    found.setdefault(tensor, []).append(position)
        return found

    @cached_property
    def changed(self) -> dict[int, int]:
        """Map movable tensors to the instruction that updates them."""
        movable, found = set(self.graph.movable), dict[int, int]()
        for position, run in self.program.computes:
            changed = changed_by(self.graph, self.graph.operators[run.op])
            found.update((tensor, position) for tensor in changed if tensor in movable)
        return found

    @cached_property
    def of_host(self) -> frozenset[int]:
        """Return the tensors that the host updates."""
        reads = (t for one in self.hosted for t in self.graph.operators[one.op].reads)
        return frozenset(reads) & frozenset(self.graph.movable)

    @cached_property
    def least_bytes(self) -> Ints:
        """Return memory during each instruction if movable tensors are present only while read."""
        need = np.array(self.timeline.step_bytes, dtype=np.int64)
        need -= sum(map(self.size, self.of_host.union(self.touched)))  # what nothing reads stays
        for tensor, positions in self.touched.items():
            need[positions] += self.size(tensor)
        return need

    @cached_property
    def floor_bytes(self) -> int:
        """Return the smallest budget that moves of this base can meet."""
        return int(self.least_bytes.max(initial=0))

    def size(self, tensor: int) -> int:
        """Return the bytes of a tensor."""
        return self.graph.tensors[tensor].size_bytes

    def candidates(
        self, budget_bytes: int, choices: Iterable[RoomChoice] = CHOICES
    ) -> Iterator[Program]:
        """Yield programs within a budget of at least `floor_bytes`: for each choice one per round,
        whose copies are timed by the replay of the round before."""
        for choice in choices:
            plan = _Room(self, budget_bytes, choice)
            plan.keep()
            starts_s = np.array(self.timeline.start_s)
            for _ in range(ROUNDS):
                program, positions = plan.program(starts_s)
                yield program
                found = replay(self.graph, program, self.device)
                starts_s = np.array([found.start_s[i] for i in positions])


@dataclass(eq=False)
class _Room:
    """Spends the room that a budget leaves as one `RoomChoice` says, and builds the program."""

    base: MovedBase
    budget_bytes: int
    choice: RoomChoice
    stays: dict[int, list[Stay]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = self.base.least_bytes.copy()
        for tensor, positions in self.base.touched.items():
            self.stays[tensor] = [Stay(tensor, i, i) for i in positions]
        self.drops: dict[int, list[int]] = {}
        """Position → gradients whose host copy is dropped after it."""

    @property
    def reserve_bytes(self) -> int:
        """Return the bytes that are not spent on keeping tensors."""
        return int(self.choice.reserve * (self.budget_bytes - self.base.floor_bytes))

    @property
    def for_returns(self) -> int:
        """Return the part of the reserve for copies to the host alone."""
        return int(self.choice.for_returns * self.reserve_bytes)

    def keep(self) -> None:
        """Decide which tensors stay on the device between their readers, or for good."""
        limit = self.budget_bytes - self.reserve_bytes
        steps = (self._keep_whole, self._keep_between)
        for step in steps if self.choice.whole_first else reversed(steps):
            step(limit)

    def _keep_whole(self, limit: int) -> None:
        """Keep tensors for the whole step: most copies saved per byte first, then the largest."""
        base = self.base

        def saved(tensor: int) -> tuple[float, int]:
            return -len(self.stays[tensor]) - (tensor in base.changed), -base.size(tensor)

        for tensor in sorted(self.stays.keys() - base.of_host, key=lambda t: (saved(t), t)):
            size, free = base.size(tensor), np.ones(len(self.used), dtype=bool)
            for stay in self.stays[tensor]:
                free[stay.begin : stay.end + 1] = False
            if int(self.used[free].max(initial=0)) + size <= limit:
                self.used[free] += size
                del self.stays[tensor]

    def _keep_between(self, limit: int) -> None:
        """Keep tensors from one reader to the next, the shortest stretches first."""
        base = self.base
        gaps = [
            (second.begin - first.end, -base.size(tensor), first.end, tensor)
            for tensor, stays in self.stays.items()
            for first, second in pairwise(stays)
        ]
        for _, _, end, tensor in sorted(gaps):
            stays = self.stays[tensor]
            index = next(i for i, stay in enumerate(stays) if stay.end == end)
            inside = slice(end + 1, stays[index + 1].begin)
            if int(self.used[inside].max(initial=0)) + base.size(tensor) <= limit:
                self.used[inside] += base.size(tensor)
                stays[index].end = stays.pop(index + 1).end

    def program(self, starts_s: npt.NDArray[np.float64]) -> tuple[Program, list[int]]:
        """Return the program, and the position in it of every instruction of the base.

        Args:
            starts_s: when each instruction of the base starts, if the moves go as expected.
        """
        used = self.used.copy()
        each = {t: [Stay(t, stay.begin, stay.end) for stay in one] for t, one in self.stays.items()}
        busy_s = 0.0
        if self.choice.carried:
            busy_s = self._seam(starts_s).carry(each, used)
        stays = [stay for one in each.values() for stay in linked(one)]
        copied = [Stay(one.gradient, i, i) for i, one in self.base.gradients.items()]
        for key, outward, stay in sorted(
            (*self._fetches(stays, starts_s), *self._returns([*stays, *copied], starts_s, busy_s)),
            key=lambda row: (row[0], row[1], row[2].begin, row[2].tensor),
        ):
            self._widen(used, stay, key, outward)
        return self._written(stays, copied)

    def _seam(self, starts_s: npt.NDArray[np.float64]) -> Seam:
        base, room = self.base, self.budget_bytes - self.base.floor_bytes
        most_bytes = int(self.choice.carried * room)
        return Seam(base.changed, starts_s, base.device, base.size, self.budget_bytes, most_bytes)

    def _fetches(
        self, stays: list[Stay], starts_s: npt.NDArray[np.float64]
    ) -> Iterator[tuple[int, int, Stay]]:
        """Yield (instruction at which its fetch should begin, 0, stay), the last stay first. All
        fetches begin as late as the link allows if each is to arrive in time."""
        latest_s = math.inf
        for stay in sorted(stays, key=lambda s: (s.begin, s.tensor), reverse=True):
            if stay.carried:
                continue
            latest_s = min(latest_s, float(starts_s[stay.begin]))
            latest_s -= self.base.device.swap_in_time_s(self.base.size(stay.tensor))
            yield max(0, bisect_right(starts_s, latest_s) - 1), 0, stay

    def _returns(
        self, stays: list[Stay], starts_s: npt.NDArray[np.float64], busy_s: float
    ) -> Iterator[tuple[int, int, Stay]]:
        """Yield (the update, the instruction by which its copy to the host is over, stay), in the
        order of the stays' ends; the link is free from `busy_s` on."""
        free_s, host_s, graph = busy_s, 0.0, self.base.graph
        operators = dict(self.base.program.computes)
        self.drops = {}
        for stay in sorted(stays, key=lambda s: (s.end, s.tensor)):
            host = self.base.gradients.get(stay.begin)
            if host is not None and host.gradient == stay.tensor:
                update, time_s = stay.begin, 0.0
            else:
                host, update = None, self.base.changed.get(stay.tensor, -1)
                if stay.leaves or not stay.begin <= update <= stay.end:
                    continue
                time_s = graph.operators[operators[update].op].time_s
            free_s = max(free_s, float(starts_s[update]) + time_s)
            free_s += self.base.device.swap_out_time_s(self.base.size(stay.tensor))
            until = bisect_left(starts_s, free_s)
            if host is not None:
                host_s = max(host_s, free_s) + host.time_s
                drop = stay.end if self.choice.drops_at_once else bisect_left(starts_s, host_s)
                self.drops.setdefault(max(drop, update), []).append(stay.tensor)
            yield update, until, stay

    def _widen(self, used: Ints, stay: Stay, key: int, until: int) -> None:
        """Let a stay begin earlier, towards `key`, or (with `until`) end later, where that fits."""
        size = self.base.size(stay.tensor)
        if until:
            inside = slice(stay.end + 1, max(stay.end + 1, until))
            late = np.flatnonzero(used[inside] + size > self.budget_bytes)
            if len(late):
                inside = slice(inside.start, inside.start + int(late[0]))
            stay.end = inside.stop - 1
        else:
            first = 0 if stay.before is None else stay.before.end + 1
            inside = slice(min(max(key, first), stay.begin), stay.begin)
            early = np.flatnonzero(used[inside] + size > self.budget_bytes - self.for_returns)
            if len(early):
                inside = slice(inside.start + int(early[-1]) + 1, inside.stop)
            stay.begin = inside.start
        used[inside] += size

    def _written(self, stays: list[Stay], copied: list[Stay]) -> tuple[Program, list[int]]:
        begins: dict[int, list[Stay]] = {}
        ends: dict[int, list[Stay]] = {}
        for stay in sorted(stays, key=lambda s: (self._first_use(s), s.tensor)):
            if not stay.leaves:
                ends.setdefault(stay.end, []).append(stay)
            if stay.carried:
                continue
            if not stay.joins:
                begins.setdefault(stay.begin, []).append(stay)
            elif stay.before is not None:
                ends[stay.before.end].remove(stay.before)
        moved = {stay.tensor for stay in stays} - {stay.tensor for stay in stays if stay.leaves}
        outs: dict[int, list[int]] = {}
        for tensor, update in self.base.changed.items():
            if tensor in moved:
                outs.setdefault(update, []).append(tensor)
        carried = sorted((stay.end, stay.tensor) for stay in stays if stay.carried)
        listed: list[Instruction] = [SwapOut(tensor) for _, tensor in carried]
        positions: list[int] = []
        left: dict[int, list[int]] = {}
        for stay in copied:
            left.setdefault(stay.end, []).append(stay.tensor)
        length = len(self.base.program)
        for position, instruction in enumerate(self.base.program):
            listed += (SwapIn(stay.tensor) for stay in begins.get(position, ()))
            positions.append(len(listed))
            host = self.base.gradients.get(position)
            if host is None:
                listed.append(instruction)
            else:
                listed += (SwapOut(host.gradient), Compute(host.op, (), host.implementation))
            listed += map(SwapOut, outs.get(position, ()))
            listed += map(Free, left.get(position, ()))
            listed += (Free(stay.tensor) for stay in ends.get(position, ()))
            listed += map(DropHost, self.drops.get(position, ()))
        late = (t for i, tensors in sorted(self.drops.items()) if i >= length for t in tensors)
        listed += map(DropHost, late)
        return Program(listed), positions

    def _first_use(self, stay: Stay) -> int:
        uses = self.base.touched[stay.tensor]
        return uses[bisect_left(uses, stay.begin)]

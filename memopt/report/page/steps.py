"""A program as the page reads it: its moments, and the tensors' lifetimes.

A moment is an instruction other than a Free, or a wait before an instruction. In a list of moments
a number of at least 0 is a run of `GraphTables`; a negative one is a code, see `WAIT`, `LOSS` and
`MOVED`. Lifetimes are half-open intervals of moments, so that their sizes, the resident bytes
and the workspace add up to the replay's memory, byte for byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from memopt.models.device import Device
from memopt.programs.instructions import Compute, Program
from memopt.programs.lifetimes import Lifetime, lifetimes
from memopt.programs.moved import resident_under
from memopt.programs.replay import Direction, Timeline, replay
from memopt.report.page.tables import GraphTables

WAIT, LOSS, MOVED = -1, -2, 3
"""Codes of moments: a wait; the loss; -(MOVED + 3t + c) for a move of tensor t, where c = 0: a copy
to the host begins, 1: a copy back begins, 2: a host copy is dropped."""

STREAMS = (Direction.TO_HOST, Direction.FROM_HOST, Direction.NETWORK, Direction.HOST)
"""The streams beside compute; copies refer to them by position."""

TRANSIENT, FETCHED, TAKES_OVER, STAYS, TANGENT = 1, 2, 4, 8, 16
"""Flags of a lifetime: written and not kept; begun by a copy back; in the storage of another
tensor; live at the end of the step; begun by the loss."""


def packed(tables: GraphTables, program: Program, device: Device) -> dict[str, Any]:
    """Encode a program's moments, waits, lifetimes and copies.

    `waits` are the (begin, end) of each wait in order, seconds; every other moment starts when
    the one before it is over and takes its run's time. `lifetimes` is a flat list of rows of four
    integers: tensor, first moment less that of the row before, number of moments, flags. `copies`
    are (tensor, number in `STREAMS`, start and end in seconds), including collectives and updates
    on the host. `host` are the host copies, rows of tensor, first moment and moment of its end.
    `resident` are the tensors that are on the device during the whole step.
    """
    timeline = replay(tables.graph, program, device)
    keys, moments, waits = _moments(tables, program, timeline)
    peak = timeline.peak_instruction
    found = lifetimes(tables.graph, program)
    runs = dict(program.computes)
    rows: list[int] = []
    last = 0
    for lifetime in found.device:
        begin = bisect_left(keys, 2 * lifetime.begin + 1)
        end = bisect_left(keys, _after(lifetime))
        flags = _flags(lifetime, runs, program.boundary)
        rows += [lifetime.tensor, begin - last, end - begin, flags]
        last = begin
    host = [
        [one.tensor, bisect_left(keys, 2 * one.begin + 1), bisect_left(keys, 2 * one.end + 1)]
        for one in found.host
    ]
    return {
        "moments": moments,
        "waits": waits,
        "lifetimes": rows,
        "host": host,
        "resident": sorted(resident_under(tables.graph, program)),
        "copies": [
            [x.tensor, STREAMS.index(x.direction), x.start_s, x.end_s]
            for x in (*timeline.transfers, *timeline.collectives, *timeline.host_updates)
        ],
        "peak": None if peak is None else bisect_left(keys, 2 * peak + 1),
        "time_s": timeline.time_s,
        "backward_s": None if program.boundary is None else timeline.end_s[program.boundary],
    }


def _moments(
    tables: GraphTables, program: Program, timeline: Timeline
) -> tuple[list[int], list[int], list[list[float]]]:
    """Return the moments' (keys, codes, waits); a key is 2·position + 1 for an instruction and
    2·position for a wait before it."""
    runs, steps = dict(program.computes), set(program.steps)
    keys: list[int] = []
    moments: list[int] = []
    waits: list[list[float]] = []
    for position, instruction in enumerate(program):
        stall_s, start_s = timeline.stall_s[position], timeline.start_s[position]
        if stall_s > 0:
            keys.append(2 * position)
            moments.append(WAIT)
            waits.append([start_s - stall_s, start_s])
        if position not in steps:
            continue
        keys.append(2 * position + 1)
        if position in runs:
            moments.append(tables.run(runs[position]))
        elif position == program.boundary:
            moments.append(LOSS)
        else:
            effects = instruction.effects(tables.graph)
            named = (effects.host_begins, effects.begins, effects.host_ends)
            code, tensor = next((c, x[0]) for c, x in enumerate(named) if x)
            moments.append(-(MOVED + 3 * tensor + code))
    return keys, moments, waits


def _after(lifetime: Lifetime) -> int:
    """Return the first key at which a lifetime takes no memory. A freed tensor is still in memory
    while its Free waits; an overwritten one, while the Compute over it waits."""
    if lifetime.transient:
        return 2 * lifetime.end
    return 2 * lifetime.end + (2 if lifetime.freed else 1)


def _flags(lifetime: Lifetime, runs: Mapping[int, Compute], boundary: int | None) -> int:
    begun_by_loss = lifetime.begin == boundary
    return (
        TRANSIENT * lifetime.transient
        + FETCHED * (lifetime.begin not in runs and not begun_by_loss)
        + TAKES_OVER * (lifetime.overwrites is not None)
        + STAYS * lifetime.stays
        + TANGENT * begun_by_loss
    )

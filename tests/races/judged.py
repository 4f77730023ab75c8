"""Running planned steps before the judge of races."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap_streams import StreamSwap
from memopt.executor.values import place_host_copies
from memopt.programs.instructions import Program
from tests.executor.harness import Prepared
from tests.races.judge import COMPUTE, OTHER, Judge, JudgedStreams

Scenario = Callable[[Judge, PlannedModule], None]
"""Steps of a planned module, before a judge."""


def planned_before(
    judge: Judge,
    prepared: Prepared,
    program: Program,
    *,
    interpreted: bool = False,
    streams: type[JudgedStreams] = JudgedStreams,
    swap: type[StreamSwap] = StreamSwap,
) -> PlannedModule:
    """The model under a program, whose copies are made on streams that the judge sees."""
    pool_bytes = place_host_copies(prepared.graph, program).extent_bytes
    installed = install(
        prepared.captured,
        prepared.lowering,
        program,
        interpreted=interpreted,
        swap=swap(streams(judge), pool_bytes),
    )
    return PlannedModule(
        prepared.model, prepared.captured, runtime_of(prepared.captured), installed
    )


def judged(prepared: Prepared, program: Program, scenario: Scenario, **how: Any) -> Judge:
    """What the judge says of a program in a scenario; `how` is as for `planned_before`."""
    judge = Judge()
    planned = planned_before(judge, prepared, program, **how)
    with judge:
        scenario(judge, planned)
        gc.collect()
    return judge


def complaints(judge: Judge) -> list[str]:
    """What is wrong, in words: each race, and each stream too many."""
    races = [
        f"{one.current_access.operator} on {one.current_access.stream} is not ordered after "
        f"{one.previous_access.operator} on {one.previous_access.stream}"
        for one in judge.found  # type: ignore[attr-defined]  # all are unsynchronized accesses
    ]
    more = sorted(judge.launches.keys() - {COMPUTE, OTHER, "out", "in"})
    return [*dict.fromkeys(races), *(f"a stream of its own: {name}" for name in more)]

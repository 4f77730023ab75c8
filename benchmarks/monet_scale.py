"""MONeT's plans of whole models beside their proved bound and Rotor's plan, within a time limit.

Estimated for an H100, batch 32, exact implementations. Budgets are floor + share·(peak − floor),
floor being Rotor's smallest. The bound holds for every plan with these implementations, without
transfers, that runs the backward in the graph's order.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.graphs import step_graph
from benchmarks.runner import Benchmark, Line, named
from benchmarks.table import gib, signed
from memopt.api.planning import solve
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import Rotor
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.shared.chain_programs import rotor_programs

FAMILIES = ("resnet50", "googlenet", "unet", "vgg16", "mobilenet_v2")


def _planned(given: Any, name: str) -> list[Line]:
    graph = step_graph(name)
    base = replay(graph, store_all(graph))
    floor = solve(graph, "min", Rotor(), device=Device()).budget
    assert floor is not None
    lines = []
    for share in given.shares:
        budget = floor + int(share * (base.peak_bytes - floor))
        plain = rotor_programs(graph, budget)[0]
        assert plain is not None
        plain_s = replay(graph, plain).time_s
        begin, cpu_begin = time.perf_counter(), time.process_time()
        found = Monet().solve(graph, budget, time_limit_s=given.limit)
        assert None not in (found.program, found.time_s, found.lower_bound_s, found.gap)
        assert validate_and_replay(graph, found.program, Budget(budget), None)[0] is None
        assert found.time_s <= plain_s * (1 + 1e-9)
        overheads = (x / base.time_s - 1 for x in (plain_s, found.time_s, found.lower_bound_s))
        lines.append(
            Line(
                f"{name} | {len(graph.operators)} | {share} | {gib(budget, 2)} | "
                f"{' | '.join(map(signed, overheads))} | {found.gap:.1%} | "
                f"{time.perf_counter() - begin:.0f} | {time.process_time() - cpu_begin:.0f} | "
                f"{found.stats['chosen']}"
            )
        )
    return lines


BENCHMARK = Benchmark(
    cases=named(FAMILIES),
    measure=_planned,
    head="model | operators | share | GiB | Rotor | monet | bound | gap | s | CPU s | by",
    options={"limit": 60.0, "shares": (0.25, 0.5, 0.75)},
)

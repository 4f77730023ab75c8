"""Placement of the outside instances of google/minimalloc (tests/data/minimalloc).

Two runs an instance: within the best published peak (which is how minimalloc is run: a capacity
is given), and minimising the peak. Seconds are CPU time, compiled code apart, the least of the
repeats for the first seed; published seconds are minimalloc's own, on its authors' machine. Fails
if a best published peak is missed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.runner import Benchmark, Line, named
from benchmarks.steps import timed
from memopt.strategies.olla import Placement, place, read_buffers

DATA = Path(__file__).parent.parent / "tests" / "data" / "minimalloc"
# Instance → (best published peak, minimalloc's published seconds).
PUBLISHED = {
    "A": (1048576, 4.910),
    "B": (1048576, 3.661),
    "C": (1039360, 0.637),
    "D": (1048576, 2.674),
    "E": (1048576, 3.717),
    "F": (1048576, 5.358),
}
MOST_S = 10.0
"""An instance should not take longer."""


def _placed(given: Any, name: str) -> list[Line]:
    buffers, _ = read_buffers(DATA / f"{name}.1048576.csv")
    best, first = PUBLISHED[name][0], given.seeds[0]

    def placed(capacity: int | None, seed: int) -> tuple[Placement, float, float]:
        return timed(lambda: place(buffers, capacity=capacity, seed=seed))

    repeats = [placed(best, first) for _ in range(given.repeats)]
    seconds = [min(cpu_s for _, _, cpu_s in repeats)]
    seconds += [placed(best, seed)[2] for seed in given.seeds[1:]]
    least, _, least_s = placed(None, first)
    found, (limit, published_s) = repeats[0][0], PUBLISHED[name]
    line = (
        f"{name} | {found.bound} | {limit} | {found.peak} | {seconds[0]:.2f} | "
        f"{min(seconds):.2f}-{max(seconds):.2f} | {published_s:.3f} | {least.peak} | "
        f"{least_s:.2f} | {least.status}"
    )
    slow = f"{name}: over {MOST_S:g} s" * (seconds[0] > MOST_S)
    return [Line(line, f"{name} misses the published peak" if found.peak > limit else slow)]


BENCHMARK = Benchmark(
    cases=named(tuple(PUBLISHED)),
    measure=_placed,
    head="instance | bound | best published | reached | s | s, by seed | minimalloc, published s | "
    "without a capacity | s | status",
    options={"seeds": (0, 1, 2), "repeats": 3},
    prepare=lambda _: place(read_buffers(DATA / "D.1048576.csv")[0], work_limit=100_000_000),
)

"""How long Rotor's programs take on synthetic chains, compiled code apart.

    python -m benchmarks.rotor_solve [--quick | --quality]

Each line: strategy, stages, slots, wall seconds (the least of the repeats), CPU seconds of all
threads, size of the table, number of schedules on the curve. A solve is the whole memory-time
trade-off: table, schedules, their replay. Chains look like a ResNet's: sizes fall by a factor 8
from the first stage to the last, times and ā vary at random. --quality instead prints the step
time that each strategy reaches on one chain, over the time without recomputation, at budgets
floor + x (store-all - floor), floor being Rotor's smallest.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numba
import numpy as np

from memopt.models.chain import Chain, Stage
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.strategies import ChainStrategy, TableStrategy


def synthetic_chain(layers: int, seed: int = 0) -> Chain:
    """A chain of `layers` stages and a loss that costs nothing."""
    draw = np.random.default_rng(seed)
    stages = []
    for i in range(layers):
        scale = 2.0 ** -(3 * i // layers)
        output = int(1e6 * scale * draw.choice([1, 1, 1, 2]))
        stages.append(
            Stage(
                forward_time_s=float(draw.uniform(0.5, 1.5)),
                backward_time_s=float(draw.uniform(1, 3)),
                output_bytes=output,
                saved_bytes=int(output * draw.uniform(2, 5)),
                gradient_bytes=output,
                forward_overhead_bytes=int(output * draw.uniform(0, 1)),
                backward_overhead_bytes=int(output * draw.uniform(0, 2)),
                parameter_gradient_bytes=int(1e4 / scale),
            )
        )
    return Chain(500_000, [*stages, Stage(0.0, 0.0, 0, 0, 0)], resident_bytes=10**7)


def measure(strategy: TableStrategy, layers: int, repeats: int) -> str:
    """One line of the table."""
    chain = synthetic_chain(layers)
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        plans = strategy.plan_set(chain)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    mode = "exact" if plans.stats["mode"] == "exact" else str(plans.stats["slots"])
    return (
        f"{strategy.name:14} {layers:6d} {mode:>6} {min(walls):9.3f} {min(cpus):9.3f} "
        f"{plans.stats['cells']:>12,} {len(plans.points):7d}"
    )


def quality(layers: int) -> str:
    """Relative step times of the strategies, one line each."""
    chain = synthetic_chain(layers)
    least, most = Rotor().smallest_budget(chain), Sequential(1).smallest_budget(chain)
    strategies: dict[str, ChainStrategy] = {
        "rotor, 500 slots": Rotor(exact_stages=0),
        "rotor, exact": Rotor(slots=None),
        "rotor-optimal": RotorOptimal(),
        "rotor-free": RotorFree(),
        "revolve": Revolve(),
        "sequential, best": Sequential("best"),
    }
    shares = (0, 0.1, 0.25, 0.5, 0.75)
    lines = [f"{layers} layers, floor {least / most:.3f} of store-all; x = {shares}"]
    for name, strategy in strategies.items():
        found = [strategy.solve(chain, int(least + x * (most - least))).time_s for x in shares]
        cells = ["    -" if t is None else f"{t / chain.compute_time_s:.3f}" for t in found]
        lines.append(f"{name:18} {'  '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what takes over 10 s")
    parser.add_argument("--quality", action="store_true", help="step times instead of solve times")
    options = parser.parse_args()
    if options.quality:
        sys.stdout.write(quality(70) + "\n" + quality(200) + "\n")
        return
    quick = options.quick
    slotted = {"slots": 500, "exact_stages": 0}
    cases: list[tuple[TableStrategy, int, int]] = [
        *((Rotor(**slotted), layers, 3) for layers in (50, 100, 200, 339)),
        (Revolve(**slotted), 339, 3),
        *((RotorOptimal(**slotted), layers, 3) for layers in (50, 100)),
        *((RotorFree(**slotted), layers, 1) for layers in (25, 49)),
        *((Rotor(slots=None), layers, 1) for layers in (20, 40, 60, 80)),
        *((RotorOptimal(slots=None), layers, 1) for layers in (20, 40)),
        *((RotorFree(slots=None), layers, 1) for layers in (20, 40)),
    ]
    if not quick:
        cases += [(Rotor(**slotted), 1000, 1), (RotorFree(**slotted, most_stages=101), 100, 1)]
    write = sys.stdout.write
    for kind in (Rotor, Revolve, RotorOptimal, RotorFree):
        for stages in (0, 40):
            kind(slots=20, exact_stages=stages).plan_set(synthetic_chain(5))
    write(f"{numba.get_num_threads()} threads, compiled code loaded\n")
    write("strategy       layers  slots    wall_s     cpu_s        cells schedules\n")
    for strategy, layers, repeats in cases:
        write(measure(strategy, layers, repeats) + "\n")
        sys.stdout.flush()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    write(f"peak resident memory of the process: {peak:.2f} GiB\n")


if __name__ == "__main__":
    main()

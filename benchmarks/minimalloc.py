"""Placement of the outside instances of google/minimalloc (tests/data/minimalloc).

    python benchmarks/minimalloc.py [--seed 0] [--repeats 3]

Two runs an instance: within the best published peak (which is how minimalloc is run: a capacity
is given), and minimising the peak. Seconds are the least of the repeats, compiled code apart;
published seconds are minimalloc's own, on its authors' machine. Fails if a best published peak
is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from memopt.strategies.olla import place, read_buffers

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


def main() -> int:
    """Print the table; 0 if every best published peak is reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    place(read_buffers(DATA / "C.1048576.csv")[0])
    total_s = published_total_s = 0.0
    missed = []
    print(
        "instance  bound    best published  within it: s (minimalloc)  minimised: peak, s, status"
    )
    for name, (best, published_s) in PUBLISHED.items():
        buffers, _ = read_buffers(DATA / f"{name}.1048576.csv")
        seconds = []
        for _ in range(arguments.repeats):
            began = time.perf_counter()
            within = place(buffers, capacity=best, seed=arguments.seed)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        least = place(buffers, seed=arguments.seed)
        least_s = time.perf_counter() - began
        if within.peak > best:
            missed.append(name)
        total_s += min(seconds)
        published_total_s += published_s
        print(
            f"{name:8s}  {within.bound:7d}  {best:14d}  {min(seconds):8.3f} ({published_s:.3f})"
            f"{'':11s}  {least.peak} {least_s:.2f} {least.status}"
        )
    print(f"total: {total_s:.2f} s, minimalloc as published {published_total_s:.2f} s")
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

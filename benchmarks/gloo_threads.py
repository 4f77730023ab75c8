"""Collectives of a gloo group under torch's memory profiler, until the heap is corrupted or not.

    python -m benchmarks.gloo_threads [--collectives 400000] [--two]

Without a plan of memopt's: one process alternates reduce-scatters and all-gathers, 400 of them in
each profile. `--two` leaves the group the two threads that torch gives it, which torch 2.13 ends
with a segmentation fault now and then; else it has one (`tests.distributed.gloo`, which says why).
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed

from tests.distributed.gloo import in_one_thread

PER_PROFILE = 400


def profiled(group: str, count: int) -> int:
    """So many collectives in one profile; how many events it saw."""
    collectives = torch.ops._c10d_functional
    value = torch.randn(64)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for _ in range(count // 2):
            part = collectives.reduce_scatter_tensor(value, "avg", 1, group)
            part = collectives.wait_tensor(part)
            collectives.wait_tensor(collectives.all_gather_into_tensor(part, 1, group))
    return len(profile.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gloo_threads", description=__doc__)
    parser.add_argument("--collectives", type=int, default=400_000)
    parser.add_argument("--two", action="store_true", help="leave the group its two threads")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    if not options.two:
        in_one_thread()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    world = torch.distributed.group.WORLD
    assert world is not None
    begin = time.perf_counter()
    for done in range(0, options.collectives, PER_PROFILE):
        profiled(world.group_name, PER_PROFILE)
        if done % (50 * PER_PROFILE) == 0:
            seconds = time.perf_counter() - begin
            print(f"{done + PER_PROFILE} collectives, {seconds:.0f} s", flush=True)
    print(f"{options.collectives} collectives ran through")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

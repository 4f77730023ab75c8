"""The CUDA caching allocator's rules: reserved bytes worked out by hand, and invariants."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.caching_allocator import (
    LARGE_BYTES,
    LARGE_SEGMENT_BYTES,
    ROUND_BYTES,
    SEGMENT_ROUND_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Allocate,
    CachingAllocator,
    Release,
    allocation_trace,
    replay_allocations,
)
from memopt.models.generate import random_graph
from memopt.programs.liveness import store_all
from memopt.programs.validate import validate
from memopt.strategies.olla import place_program

MIB = 2**20


def test_constants_are_those_of_the_installed_torch() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    header = Path(spec.origin).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    text = header.read_text(encoding="utf-8")
    constants = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    constants.pop("kLargeBuffer", None)
    assert {name: int(value) for name, value in constants.items()} == {
        "kMinBlockSize": ROUND_BYTES,
        "kSmallSize": SMALL_BYTES,
        "kSmallBuffer": SMALL_SEGMENT_BYTES,
        "kMinLargeAlloc": LARGE_BYTES,
        "kRoundLarge": SEGMENT_ROUND_BYTES,
    }
    assert re.search(rf"(large_segment_size_\{{|kLargeBuffer = ){LARGE_SEGMENT_BYTES}\b", text)


def reserved(*events: Allocate | Release) -> int:
    return replay_allocations(events).reserved_peak_bytes


def test_reserved_bytes_by_hand() -> None:
    assert reserved(Allocate("a", 1)) == 2 * MIB
    assert reserved(Allocate("a", MIB), Allocate("b", MIB)) == 2 * MIB
    assert reserved(Allocate("a", MIB), Allocate("b", MIB), Allocate("c", 1)) == 4 * MIB
    assert reserved(Allocate("a", MIB + 1)) == 20 * MIB
    assert reserved(Allocate("a", 10 * MIB)) == 10 * MIB
    assert reserved(Allocate("a", 10 * MIB + 1)) == 12 * MIB
    # The rest of 1 MiB is not split off in the large pool, so it serves nobody.
    assert reserved(Allocate("a", 19 * MIB), Allocate("b", MIB + 1)) == 40 * MIB
    assert reserved(Allocate("a", 9 * MIB), Allocate("b", 9 * MIB)) == 20 * MIB


def test_neighbours_merge_and_the_smallest_fit_serves() -> None:
    events = [Allocate(name, 5 * MIB) for name in "abcd"] + [Release("b"), Release("c")]
    assert reserved(*events, Allocate("e", 9 * MIB)) == 20 * MIB
    assert reserved(*events, Allocate("e", 11 * MIB)) == 32 * MIB


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_invariants(seed: int, count: int) -> None:
    rng, allocator, used = Random(seed), CachingAllocator(), set[int]()
    for step in range(count):
        if used and rng.random() < 0.45:
            allocator.release(used.pop())
        else:
            allocator.allocate(step, rng.randint(1, rng.choice((2000, 2 * MIB, 30 * MIB))))
            used.add(step)
        blocks = [block for segment in allocator.segments() for block in segment]
        for low, high in itertools.pairwise(blocks):
            assert low.address + low.size_bytes == high.address
        assert sum(block.size_bytes for block in blocks) == allocator.reserved_bytes
        busy = sum(block.size_bytes for block in blocks if not block.free)
        assert busy == allocator.allocated_bytes <= allocator.reserved_bytes
    for name in used:
        allocator.release(name)
    assert all(len(s) == 1 and s[0].free for s in allocator.segments())


def test_traces_of_store_all_and_of_its_placement() -> None:
    graph = random_graph(Random(2), 12, max_bytes=12 * MIB)
    own = store_all(graph)
    placed, _ = place_program(graph, own)
    assert validate(graph, placed) is None
    loose, tight = (replay_allocations(allocation_trace(graph, p)) for p in (own, placed))
    assert loose.allocated_peak_bytes <= loose.reserved_peak_bytes
    assert tight.reserved_peak_bytes < loose.reserved_peak_bytes
    assert tight.fragmentation < loose.fragmentation

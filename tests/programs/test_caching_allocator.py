"""The CUDA caching allocator's rules: reserved bytes worked out by hand, and invariants."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.allocator_snapshot import settings_of
from memopt.models.generate import random_graph
from memopt.programs.allocator_requests import (
    Allocate,
    Release,
    allocation_trace,
    replay_allocations,
    reserved_by,
)
from memopt.programs.allocator_settings import (
    LARGE_BYTES,
    LARGE_SEGMENT_BYTES,
    ROUND_BYTES,
    SEGMENT_ROUND_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    next_division,
)
from memopt.programs.caching_allocator import CachingAllocator
from memopt.programs.liveness import store_all
from memopt.programs.validate import validate
from memopt.strategies.olla import place_program
from tests.report.cases import moving_plan

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


def reserved(*events: Allocate | Release, **how: object) -> int:
    chosen = AllocatorSettings(**how)  # type: ignore[arg-type]
    return replay_allocations(events, chosen).reserved_peak_bytes


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


SETTINGS = (
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(max_split_bytes=24 * MIB, capacity_bytes=300 * MIB),
    AllocatorSettings(capacity_bytes=300 * MIB, garbage_collection_threshold=0.5),
    AllocatorSettings(expandable_segments=True, capacity_bytes=300 * MIB),
    AllocatorSettings(roundup_power2_divisions=8),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from(SETTINGS))
def test_invariants(seed: int, count: int, chosen: AllocatorSettings) -> None:
    rng, allocator, used = Random(seed), CachingAllocator(chosen), set[int]()
    for step in range(count):
        if used and rng.random() < 0.45:
            gone = rng.choice(sorted(used))
            used.remove(gone)
            allocator.release(gone)
        else:
            size = rng.randint(1, rng.choice((2000, 2 * MIB, 30 * MIB)))
            try:
                allocator.allocate(step, size, rng.randrange(2))
            except MemoryError:
                assert chosen.capacity_bytes is not None
                continue
            used.add(step)
        check_state(allocator)
    for name in used:
        allocator.release(name)
    allocator.empty_cache()
    check_state(allocator)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def check_state(allocator: CachingAllocator) -> None:
    segments = list(allocator.segments())
    blocks = [block for segment in segments for block in segment]
    for segment in segments:
        for low, high in itertools.pairwise(segment):
            touching = low.address + low.size_bytes == high.address
            # Only an expandable segment has gaps; free neighbours have merged.
            assert touching or allocator.settings.expandable_segments
            assert not (low.free and high.free and touching)
    assert sum(block.size_bytes for block in blocks) == allocator.reserved_bytes
    busy = sum(block.size_bytes for block in blocks if not block.free)
    assert busy == allocator.allocated_bytes <= allocator.reserved_bytes
    capacity = allocator.settings.capacity_bytes
    assert capacity is None or allocator.reserved_peak_bytes <= capacity


def test_sizes_of_the_documentation() -> None:
    """PyTorch's "CUDA semantics": 1200 with 4 divisions is 1280."""
    assert next_division(1200, 4) == 1280
    assert [next_division(size, 4) for size in (1024, 1025, 1537, 1793)] == [1024, 1280, 1792, 2048]
    by = AllocatorSettings(roundup_power2_divisions=4)
    assert by.request_bytes(5 * MIB + 1) == 6 * MIB
    assert by.request_bytes(2048) == 2048
    assert by.request_bytes(700) == 1024 == AllocatorSettings().request_bytes(700)


def test_expandable_segments_grow_by_chunks() -> None:
    """One segment: what does not fit 20 MiB chunks one by one fits their sum."""
    sizes = [Allocate(k, 15 * MIB) for k in range(4)]
    assert reserved(*sizes) == 4 * 16 * MIB
    assert reserved(*sizes, expandable_segments=True) == 60 * MIB
    # Three freed neighbours serve one request of their size; separate segments do not.
    freed = [Release(k) for k in range(3)]
    assert reserved(*sizes, *freed, Allocate("x", 45 * MIB)) == 64 * MIB + 46 * MIB
    assert reserved(*sizes, *freed, Allocate("x", 45 * MIB), expandable_segments=True) == 60 * MIB
    assert reserved(Allocate("a", 1), Allocate("b", MIB), expandable_segments=True) == 2 * MIB
    assert reserved(Allocate("a", MIB + 1), expandable_segments=True) == 20 * MIB


def test_chunks_that_nobody_uses_go_back() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    for name in "abc":
        allocator.allocate(name, 20 * MIB)
    allocator.release("b")
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    # The gap is filled first: it is the lowest address where the request fits.
    assert allocator.allocate("d", 18 * MIB) == 20 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_oversize_blocks_are_not_split_and_serve_only_their_like() -> None:
    limit = {"max_split_bytes": 40 * MIB}
    big = [Allocate("a", 60 * MIB), Release("a")]
    assert reserved(*big, Allocate("b", 10 * MIB)) == 60 * MIB
    assert reserved(*big, Allocate("b", 10 * MIB), **limit) == 70 * MIB
    assert reserved(*big, Allocate("b", 50 * MIB), **limit) == 60 * MIB
    # 20 MiB more than is asked for, or above: not that block.
    assert reserved(*big, Allocate("b", 40 * MIB), **limit) == 100 * MIB


def test_a_full_device_gives_cached_segments_back_before_it_fails() -> None:
    held = [Allocate("a", 60 * MIB), Allocate("b", 30 * MIB), Release("a"), Release("b")]
    assert reserved(*held, Allocate("c", 80 * MIB), capacity_bytes=100 * MIB) == 90 * MIB
    with pytest.raises(MemoryError, match="do not fit"):
        reserved(*held, Allocate("c", 102 * MIB), capacity_bytes=100 * MIB)
    # Of blocks that are never split, those that suffice go and the others stay.
    allocator = CachingAllocator(
        AllocatorSettings(max_split_bytes=24 * MIB, capacity_bytes=100 * MIB)
    )
    for name, size in (("a", 60), ("b", 30)):
        allocator.allocate(name, size * MIB)
        allocator.release(name)
    allocator.allocate("c", 10 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate("d", 12 * MIB)
    assert allocator.reserved_bytes == 82 * MIB


def test_blocks_that_are_never_split_go_back_together_where_one_is_too_small() -> None:
    allocator = CachingAllocator(
        AllocatorSettings(max_split_bytes=24 * MIB, capacity_bytes=100 * MIB)
    )
    for name, size in (("a", 40), ("b", 30), ("c", 26)):
        allocator.allocate(name, size * MIB)
    for name in "abc":
        allocator.release(name)
    allocator.allocate("d", 66 * MIB)
    # The two largest go, which is enough.
    assert allocator.reserved_bytes == (26 + 66) * MIB


def test_whole_chunks_within_a_free_block_go_back() -> None:
    """a and c stay in the chunks around those that b alone had."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    for name, size in (("a", 5), ("b", 40), ("c", 5)):
        allocator.allocate(name, size * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.release("b")
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate("d", 14 * MIB) == 5 * MIB
    assert allocator.allocate("e", 40 * MIB) == 50 * MIB


def test_requests_that_cannot_be_served() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 40 * MIB)
    assert allocator.allocate("nothing", 0) is None
    with pytest.raises(ValueError, match="'a' is allocated already"):
        allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        allocator.allocate("b", -1)


def test_garbage_collection_takes_what_is_old() -> None:
    allocator = CachingAllocator(
        AllocatorSettings(capacity_bytes=200 * MIB, garbage_collection_threshold=0.5)
    )
    for name, size in (("old", 60), ("new", 40), ("x", 12)):
        allocator.allocate(name, size * MIB)
    allocator.release("old")
    for _ in range(4):
        allocator.release("x")
        allocator.allocate("x", 12 * MIB)
    allocator.release("new")
    assert allocator.reserved_bytes == 112 * MIB
    allocator.allocate("more", 70 * MIB)
    # Beyond half of the capacity: the older of the cached segments has gone, the other has not.
    assert allocator.reserved_bytes == (112 - 60 + 70) * MIB


def test_streams_have_pools_of_their_own() -> None:
    one = [Allocate("a", MIB), Release("a"), Allocate("b", MIB)]
    assert reserved(*one) == 2 * MIB
    assert reserved(*one[:2], Allocate("b", MIB, stream=1)) == 4 * MIB


def test_settings_are_read_as_pytorch_reads_them() -> None:
    text = "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8"
    assert AllocatorSettings.parse(f"{text},backend:native") == AllocatorSettings(
        max_split_bytes=128 * MIB, expandable_segments=True, garbage_collection_threshold=0.8
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse("max_split_size_mb:20").max_split_bytes == 20 * MIB
    assert AllocatorSettings.parse("max_non_split_rounding_mb:64").rounding_limit_bytes == 64 * MIB
    for wrong in (
        "max_split_size_mb",
        "roundup_power2_divisions:3",
        "max_split_size_mb:10",
        "expandable_segments:true",  # torch refuses it, too (ConfigTokenizer::toBool)
        "roundup_power2_divisions:[3:1]",
    ):
        with pytest.raises(ValueError, match="got"):
            AllocatorSettings.parse(wrong)


def test_size_classes_round_as_pytorch_rounds_them() -> None:
    """As torch reads them (AllocatorConfig.cpp): the first number holds for smaller classes, too,
    and classes between named ones are not rounded."""
    option = "roundup_power2_divisions:[256:1,1024:4,>:8]"
    settings = AllocatorSettings.parse(f"{option},expandable_segments:True")
    assert settings.expandable_segments
    by = (1,) * 9 + (0, 4) + (8,) * 5
    assert settings.roundup_power2_divisions == by
    snapshot = {"roundup_power2_divisions": {str(2**i): n for i, n in enumerate(by)}}
    assert settings_of(snapshot).roundup_power2_divisions == by
    # 1.0 MiB + 1: one division is none; 1.1 GiB: steps of 256 MiB; 3 GiB: steps of 256 MiB.
    assert settings.request_bytes(MIB + 1) == MIB + 512
    assert settings.request_bytes(1100 * MIB) == 1280 * MIB
    assert settings.request_bytes(2100 * MIB) == 2304 * MIB
    assert settings.request_bytes(600 * MIB + 1) == 600 * MIB + 512


def test_a_second_step_finds_the_first_ones_cache() -> None:
    graph = random_graph(Random(3), 12, max_bytes=12 * MIB)
    program = store_all(graph)
    once = replay_allocations(allocation_trace(graph, program)).reserved_peak_bytes
    assert once <= reserved_by(graph, program).reserved_peak_bytes <= 1.2 * once


@pytest.mark.parametrize("seed", range(10))
def test_what_moves_is_not_resident(seed: int) -> None:
    plan = moving_plan(seed)
    live, peak = dict[object, int](), 0
    for event in allocation_trace(plan.graph, plan.program, steps=2):
        if isinstance(event, Allocate):
            assert event.id not in live
            live[event.id] = event.size_bytes
        else:
            del live[event.id]
        peak = max(peak, sum(live.values()))
    assert peak == plan.peak_bytes


def test_traces_of_store_all_and_of_its_placement() -> None:
    before = after = 0
    for seed in range(2, 8):
        graph = random_graph(Random(seed), 12, max_bytes=12 * MIB)
        own = store_all(graph)
        placed, _ = place_program(graph, own)
        assert validate(graph, placed) is None
        loose, tight = reserved_by(graph, own), reserved_by(graph, placed)
        assert loose.allocated_peak_bytes <= loose.reserved_peak_bytes
        assert tight.fragmentation < loose.fragmentation
        before += loose.reserved_peak_bytes
        after += tight.reserved_peak_bytes
    assert after < before

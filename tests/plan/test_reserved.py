"""What CUDA's allocator would reserve: in summaries, and as what a budget limits."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import memopt
from memopt.api.reserved import LOWERED, RAISED, fastest_within
from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import check_budget, split_reserved
from memopt.models.generate import random_graph
from memopt.models.presets import H100
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.allocator_settings import AllocatorSettings

MIB = 2**20


def graph_of(seed: int = 4):
    return random_graph(Random(seed), 14, max_bytes=24 * MIB)


def test_the_word_is_read() -> None:
    assert split_reserved("6GiB reserved") == ("6GiB", True)
    assert split_reserved(" 1000 Reserved ") == (1000, True)
    assert split_reserved("6GiB") == ("6GiB", False)
    assert split_reserved(0.5) == (0.5, False)
    for wrong in ("six reserved", "min reserved", "reserved", "6 furlongs reserved"):
        with pytest.raises(ValueError, match="cannot read the budget"):
            check_budget(wrong)


def test_a_summary_for_cuda_says_what_is_reserved_and_another_does_not() -> None:
    graph = graph_of()
    plan = memopt.plan(graph, strategy="store-all", device="H100")
    found = reserved_by(graph, plan.program)
    assert plan.reserved == found
    assert f"{found.reserved_peak_bytes / MIB:.1f} MiB by the simulated CUDA" in plan.summary()
    elsewhere = memopt.plan(graph, strategy="store-all")
    assert elsewhere.reserved is None
    assert "reserved" not in elsewhere.summary()


@pytest.mark.parametrize("place", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_budget_on_reserved_bytes_is_kept(place: bool) -> None:
    """Where the same number of allocated bytes would reserve more; and it is said and saved."""
    tight = 0
    for seed in (3,) if place else (2, 3, 5):
        graph = graph_of(seed)
        base = memopt.plan(graph, strategy="rotor", device=H100, place=place)
        assert base.reserved is not None
        limit = int(0.93 * base.reserved.reserved_peak_bytes)
        by_allocated = memopt.plan(graph, budget=limit, device=H100, place=place)
        assert by_allocated.reserved is not None
        plan = memopt.plan(graph, budget=f"{limit} reserved", device=H100, place=place)
        assert plan.reserved is not None
        assert plan.peak_bytes <= plan.reserved.reserved_peak_bytes <= limit == plan.budget
        assert plan.step_time_s >= by_allocated.step_time_s
        assert "which the budget limits" in plan.summary()
        tight += by_allocated.reserved.reserved_peak_bytes > limit
    assert tight >= (not place)


def test_a_plan_within_reserved_bytes_is_saved_and_read(tmp_path) -> None:
    graph = graph_of()
    plan = memopt.plan(graph, budget="1 GiB reserved", device=H100)
    plan.save(tmp_path / "plan.json")
    read = memopt.load(tmp_path / "plan.json")
    assert read.budget == 2**30
    assert read.reserved_bytes_limited
    assert read.reserved == plan.reserved


def test_what_cannot_be_limited_is_refused() -> None:
    graph = graph_of()
    with pytest.raises(ValueError, match="for another device"):
        memopt.plan(graph, budget="1GiB reserved")
    with pytest.raises(ValueError, match="names a size"):
        memopt.plan(graph, budget="0.5 reserved", device=H100)
    least = graph.resident_bytes + 1
    with pytest.raises(InfeasibleBudgetError):
        memopt.plan(graph, budget=f"{least} reserved", device=H100)


@pytest.fixture
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_expandable_segments_are_recommended_and_help(
    as_torch_starts: pytest.MonkeyPatch,
) -> None:
    """The remedy that the message names works: the same budget has a plan with it. Its allocated
    peak is the plan's, which is at most some blocks above it otherwise."""
    graph = graph_of(2)
    base = memopt.plan(graph, strategy="store-all", device=H100)
    assert base.reserved is not None
    assert base.reserved.allocated_peak_bytes >= base.peak_bytes
    loose = base.reserved.reserved_peak_bytes
    assert "less with PYTORCH_ALLOC_CONF=expandable_segments:True" in base.summary()
    as_torch_starts.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = base.reserved
    assert found.reserved_peak_bytes < loose
    limit = found.reserved_peak_bytes
    within = memopt.plan(graph, strategy="store-all", budget=f"{limit} reserved", device=H100)
    assert within.budget == limit
    assert "less with" not in within.summary()
    as_torch_starts.delenv("PYTORCH_ALLOC_CONF")
    remedy = r"start Python with PYTORCH_ALLOC_CONF=expandable_segments:True"
    with pytest.raises(InfeasibleBudgetError, match=remedy):
        memopt.plan(graph, strategy="store-all", budget=f"{limit} reserved", device=H100)


def test_the_older_name_of_the_settings_is_read(as_torch_starts: pytest.MonkeyPatch) -> None:
    as_torch_starts.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.of_environment() == AllocatorSettings(expandable_segments=True)
    as_torch_starts.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert AllocatorSettings.of_environment() == AllocatorSettings(max_split_bytes=64 * MIB)


def test_a_plan_is_found_far_below_a_budget_that_is_hardly_exceeded() -> None:
    """What is reserved stays the same over many budgets, a little above the limit."""
    asked = []

    def solve_for(budget_bytes: int) -> Any:
        asked.append(budget_bytes)
        return SimpleNamespace(peak_bytes=min(budget_bytes, 900), step_time_s=2000 - budget_bytes)

    def used(plan: Any) -> int:
        return 1001 if plan.peak_bytes > 500 else 990

    found = fastest_within(solve_for, 1000, used, lambda least: InfeasibleBudgetError("", least))
    assert 450 < found[0] == found[1].peak_bytes <= 500
    assert len(asked) <= LOWERED + RAISED

"""Decisions that other planners have recorded: memopt's are no slower in the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import published_decisions as decisions
from benchmarks.published_decisions import DECISIONS, Decision, Row, Step
from memopt.models.budget import parse_budget
from memopt.models.device import Device
from tests.network.test_checkpointed_blocks import GRAPH

ROW = Row("deepspeed-8255-8", 2**30, 2**31, "offload-graph", 7.0, 2**30, 2**20, 6.5)


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda one: one.row)
def test_no_slower_than_theirs_in_the_same_memory(decision: Decision) -> None:
    (row,) = decisions.decided(None, decision)
    assert decisions._failures([row], None) == []
    assert row.peak_bytes <= row.budget_bytes
    assert row.least_s <= row.step_s
    if decision.moved == "0":
        assert (row.what, row.moved_bytes) == ("as it is", 0)
    else:
        assert row.needed_bytes > row.budget_bytes
    if decision.budget:
        assert row.budget_bytes == parse_budget(decision.budget, 1)


def test_a_step_is_planned_only_where_it_does_not_fit() -> None:
    step = Step(GRAPH, 0.0, Device(to_host_bytes_per_s=1.0))
    what, plan = decisions.planned(step, step.peak_bytes) or ("", None)
    assert what == "as it is"
    assert plan is not None
    what, less = decisions.planned(step, step.peak_bytes * 3 // 4) or ("", None)
    assert what.startswith("rotor")
    assert less is not None
    assert less.peak_bytes < step.peak_bytes
    assert less.step_time_s > plan.step_time_s
    assert decisions.planned(step, 1) is None


def test_the_table_has_both_decisions_and_says_who_is_slower() -> None:
    assert decisions._failures([ROW], None) == []
    slow, none = replace(ROW, step_s=7.4), replace(ROW, failed="no plan")
    assert decisions._failures([slow, none], None) == [
        "deepspeed-8255-8: slower than theirs",
        "deepspeed-8255-8: no plan",
    ]
    (line,) = decisions._blocks([ROW], None)["decisions"].splitlines()[2:]
    assert line.startswith("| qwen3-14b, 4 x 3328 on 8 H200 | 1.0 | 8.67 | 11.7 GB | 7.38 | 2.0 |")
    assert line.endswith("| offload-graph | 0.0 | 1.0 | 7.00 | 6.50 |")
    assert decisions.theirs_s("torchtitan-4636-4") == pytest.approx(4096 / 1484)

"""Steps over micro-batches, clipped and scaled, that fail: in the forward, in the backward, in the
norms, in the updates, and in the copies of what lives on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import memopt
from memopt.errors import ExecutionError
from memopt.executor.swap import ThreadSwap
from tests.whole_steps.accumulated import Pair, check_equal, deep, rows
from tests.whole_steps.test_failing_steps import Fault, FaultAt, said
from tests.whole_steps.test_train_step import assert_same


@pytest.fixture(scope="module")
def planned() -> Pair:
    """Parameters and state come from the host; all that a step can do to gradients is done."""
    pair = Pair(2, 0.1, scale=2.0**10, make=lambda: deep(32, 3), batches=rows, share=0.8)
    pair.check_steps(range(2))
    assert pair.step.host_bytes
    return pair


@pytest.fixture
def pair(planned: Pair) -> Pair:
    """With a step that can be taken back."""
    planned.step = planned.made(planned.plan, undo=True)
    # The first step takes the host memory.
    planned.check_steps([1])
    return planned


class Watch(FaultAt):
    """Notes the operators of a step, and lets none fail."""

    def __init__(self) -> None:
        super().__init__(0)
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return super().__torch_dispatch__(function, types, args, kwargs)


def state(pair: Pair) -> Any:
    return pair.everything(), torch.get_rng_state()


def places(names: list[str], every: int) -> list[int]:
    """Every so many operators, and the first of each kind that only updates, norms and checks
    have."""
    special = ("_foreach_norm", "linalg_vector_norm", "reciprocal", "sqrt", "addcdiv", "item")
    first = {next((i for i, n in enumerate(names, 1) if word in n), 1) for word in special}
    return sorted({*range(1, len(names), every), *first})


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_fails_anywhere_is_taken_back(every: int, pair: Pair) -> None:
    watch = Watch()
    with watch:
        pair.run(rows(7, 2))
    pair.expected(rows(7, 2))
    before = state(pair)
    for number in places(watch.names, every):
        torch.set_rng_state(before[-1])
        with FaultAt(number), pytest.raises((Fault, memopt.MemoptError)):
            pair.step.accumulate(rows(3, 2))
        check_equal(state(pair), before)
        assert all(p.grad is None for p in pair.model.parameters())
    pair.check_steps(range(4))


@pytest.mark.parametrize("what", ["bring", "store", "wait"])
@pytest.mark.parametrize("number", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_a_step_whose_copy_fails_is_taken_back(
    what: str, number: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, before = [0], state(pair)
    plain = getattr(ThreadSwap, what)

    def failing(self: ThreadSwap, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise Fault(what)
        return plain(self, *arguments)

    monkeypatch.setattr(ThreadSwap, what, failing)
    with pytest.raises((Fault, memopt.MemoptError)):
        pair.step.accumulate(rows(3, 2))
    monkeypatch.undo()
    check_equal(state(pair), before)
    pair.check_steps([3])


def test_without_undo_nothing_has_changed_before_the_updates(pair: Pair) -> None:
    """All updates come after the norms, so whatever fails up to there leaves no trace."""
    pair.step, data = pair.made(pair.plan), rows(3, 2)
    watch = Watch()
    with watch:
        pair.run(data, 3)
    pair.expected(data, 3)
    norms = [i for i, name in enumerate(watch.names, 1) if "linalg_vector_norm" in name]
    before = pair.everything()
    for number in {1, norms[0] // 2, norms[0], norms[-1]}:
        with FaultAt(number), pytest.raises(Fault):
            pair.run(data)
        check_equal(pair.everything(), before)
    with FaultAt(len(watch.names) - 20), pytest.raises(ExecutionError) as caught:
        pair.run(data)
    assert said(caught.value)[0] > 0
    assert pair.scaler is not None
    assert_same(pair.scaler.state_dict(), before[2])
    pair.put(before)


def test_a_scale_that_cannot_be_updated_stays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pair.everything()

    def broken() -> None:
        raise Fault("update")

    monkeypatch.setattr(pair.scaler, "update", broken)
    with pytest.raises((Fault, memopt.MemoptError)):
        pair.run(rows(4, 2))
    monkeypatch.undo()
    check_equal(pair.everything(), before)
    pair.check_steps(range(1, 4))


def test_the_host_budget_counts_what_undo_copies(planned: Pair) -> None:
    """State that moves is copied, too."""
    copied = 3 * planned.states_bytes // 4
    for share, refused in ((2.0, False), (0.5, True)):
        host_budget = planned.plan.host_peak_bytes + int(share * copied)
        plan = replace(planned.plan, host_budget=host_budget)
        if refused:
            with pytest.raises(ValueError, match="undo=True keeps copies"):
                planned.made(plan, undo=True)
        else:
            planned.made(plan, undo=True)

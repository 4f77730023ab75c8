"""Steps planned as repeated ones: what their updates leave on the device goes to the host in the
next step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.executor.swap import ThreadSwap
from memopt.programs.moved import updates_on_host
from memopt.programs.replay import replay
from tests.whole_steps.accumulated import Pair, deep, rows
from tests.whole_steps.test_failing_steps import Fault, FaultAt
from tests.whole_steps.test_moved_parameters import LOSS, Made, batch, everything, layers, lora
from tests.whole_steps.test_train_step import assert_same

SLOW = memopt.Device(to_host_bytes_per_s=5e7)
"""So slow that it always pays to leave something on the device."""
HOST = memopt.Device(to_host_bytes_per_s=5e7, host_update_bytes_per_s=2e8)


def repeated(model: nn.Module, share: float, **options: Any) -> Made:
    made = Made(model, share, **{"device": SLOW, "repeated": True, **options})
    assert carried(made)
    return made


def carried(made: Made) -> tuple[int, ...]:
    return made.step._homes.carried


def check_peak(made: Made) -> None:
    """Of the second of two steps, so that the way from one to the next is measured, too."""
    peak = made.metered_peak(2)
    assert peak <= made.plan.budget
    assert peak == pytest.approx(made.plan.peak_bytes, rel=0.005)
    put(made, everything(made))


@pytest.fixture(scope="module")
def small() -> Made:
    return repeated(layers(64, 3), 0.65)


def test_steps_equal_eager_within_the_budgets(small: Made) -> None:
    small.run(0, 3)
    small.assert_same()
    check_peak(small)
    assert small.step._homes.swap.account.peak_bytes == small.plan.host_peak_bytes
    assert f"homes.resume({carried(small)[0]})" in small.step.code
    text = " ".join(str(small.plan).split())
    count = len(carried(small))
    assert f"repeated {count} updated tensor{'s' * (count > 1)}, " in text
    assert "from one step to the next" in text


def test_between_steps_there_is_one_value(small: Made) -> None:
    """What is read or changed between steps is what the next one begins with, however it is."""
    both = small.model, small.twin
    names = [small.plan.graph.tensors[t].name for t in carried(small)]
    parameters = dict(small.model.named_parameters())
    name = next(n.removeprefix("model.") for n in names if n.removeprefix("model.") in parameters)
    for one in both:
        dict(one.named_parameters())[name].data.mul_(0.5)
    for optimizer in (small.optimizer, small.eager):
        for state in optimizer.state.values():
            state["exp_avg"].data.add_(0.25)
    small.run(5, 2)
    small.assert_same()
    saved = copy.deepcopy((small.model.state_dict(), small.optimizer.state_dict()))
    average = torch.optim.swa_utils.AveragedModel(small.model)
    small.run(7, 1)
    average.update_parameters(small.model)
    x, _ = batch(9)
    with small.step.parameters_on("cpu") as model, torch.no_grad():
        assert torch.equal(model(x), small.twin(x))
    for model, optimizer in ((small.model, small.optimizer), (small.twin, small.eager)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    small.run(8, 2)
    small.assert_same()


@pytest.mark.parametrize("undo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["bring", "store", "wait", "_submit"])
def test_a_failing_transfer(
    what: str, undo: bool, small: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has failed, no update of the step before is lost; the first transfer is the copy of
    what the step begins with on the device."""
    made = small if not undo else repeated(layers(64, 3), 0.65, undo=True)
    made.run(0, 2)
    x, y = batch(1)
    for number in (1, 2, 5):
        before = everything(made)
        plain = getattr(ThreadSwap, what)
        failing = failing_at(number, plain, in_thread=what == "_submit")
        with monkeypatch.context() as patch:
            patch.setattr(ThreadSwap, what, failing)
            with pytest.raises((Fault, memopt.MemoptError)):
                made.step(x, targets=(y,))
        if undo or number == 1:
            assert_same(everything(made)[0], before[0])
            assert_same(everything(made)[1]["state"], before[1]["state"])
        put(made, before)
        made.run(1, 2)
        made.assert_same()


def failing_at(number: int, plain: Any, *, in_thread: bool) -> Any:
    """The method, whose so-many-th call fails, or the copy that it gives to the thread."""
    calls = [0]

    def fail(*_: Any) -> None:
        raise Fault("a transfer")

    def method(self: ThreadSwap, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] != number:
            return plain(self, *arguments)
        return plain(self, fail, *arguments[1:]) if in_thread else fail()

    return method


def put(made: Made, before: Any) -> None:
    """Both models are as they were."""
    for model, optimizer in ((made.model, made.optimizer), (made.twin, made.eager)):
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))


@pytest.mark.slow
@pytest.mark.parametrize("undo", [False, True])
def test_a_failing_operator(undo: bool) -> None:
    made = repeated(layers(64, 3), 0.65, undo=undo)
    made.run(0, 2)
    before = everything(made)
    x, y = batch(1)
    failed = 0
    for number in range(1, 400, 11):
        try:
            with FaultAt(number):
                made.step(x, targets=(y,))
            break
        except (Fault, memopt.MemoptError) as error:
            failed += 1
            if undo or isinstance(error, Fault):
                assert_same(everything(made)[0], before[0])
                assert_same(everything(made)[1]["state"], before[1]["state"])
        put(made, before)
        made.run(1, 2)
        made.assert_same()
        put(made, before)
        made.run(1, 1)
        put(made, before)
    assert failed > 5


@pytest.mark.slow
def test_plans_from_files_run(small: Made, tmp_path: Path) -> None:
    made = repeated(layers(64, 3), 0.65)
    made.plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.step_time_s == made.plan.step_time_s
    assert loaded.graph.repeated
    made.step = loaded.train_step(made.model, LOSS, made.optimizer)
    assert carried(made)
    made.run(0, 2)
    made.assert_same()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "share", "options"),
    [
        (lambda: layers(192, 9), 0.25, {}),
        (lambda: layers(64, 3), 0.65, {"interpreted": True}),
        (lora, 0.4, {}),
    ],
    ids=["four times the budget", "interpreted", "frozen base"],
)
def test_twenty_steps(model: Any, share: float, options: dict[str, Any]) -> None:
    made = repeated(model(), share, **options)
    made.run(0, 20)
    made.assert_same()
    check_peak(made)


@pytest.mark.slow
def test_with_updates_on_the_host() -> None:
    """Those that remain for the device may leave something there."""
    made = Made(layers(192, 9), 0.25, device=HOST, repeated=True)
    assert updates_on_host(made.plan.graph, made.plan.program)
    made.run(0, 20)
    made.assert_same()
    check_peak(made)


@pytest.mark.slow
def test_micro_batches_clipped_and_scaled() -> None:
    options = {"share": 0.3, "device": SLOW, "steady_state": True}
    pair = Pair(4, 0.1, scale=2.0**12, make=deep, batches=rows, **options)
    assert pair.step._homes.carried
    pair.check_steps(range(20))


def test_it_goes_with_movable() -> None:
    model, (x, y) = layers(8, 1), batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match='pass movable="all" too'):
        memopt.plan(
            model, x, loss_fn=LOSS, targets=(y,), optimizer=optimizer, strategy="offload-graph",
            steady_state=True, progress=False,
        )  # fmt: skip


def test_the_plan_is_timed_as_it_is_replayed(small: Made) -> None:
    plan = small.plan
    assert plan.step_time_s == replay(plan.graph, plan.program, plan.device).time_s
    assert plan.lower_bound_s <= plan.step_time_s

"""A train step that fails leaves everything as it was, or says exactly what it has changed."""

from __future__ import annotations

import copy
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.errors import ExecutionError
from memopt.executor import swap
from memopt.executor.train_step import TrainStep
from memopt.step.step_optimizer import HostState
from tests.whole_steps.test_train_step import assert_same


class Fault(RuntimeError):
    """What fails."""


class FaultAt(TorchDispatchMode):
    """An error, or an interruption, at the k-th operator."""

    def __init__(self, number: int, kind: type[BaseException] = Fault) -> None:
        super().__init__()
        self.number, self.kind, self.seen = number, kind, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not a user's mode, inside of which planned modules run unplanned."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        if self.seen == self.number:
            raise self.kind("at an operator")
        return function(*args, **(kwargs or {}))


class Made:
    """A small model with its planned step."""

    def __init__(
        self,
        offloaded: bool,
        steps: int = 1,
        undo: bool = False,
        host_budget: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.optimizer: Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, **options)
        self.x, self.y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        loss = nn.functional.cross_entropy
        plan = memopt.plan(
            self.model,
            self.x,
            loss_fn=loss,
            targets=(self.y,),
            optimizer=self.optimizer,
            strategy="olla" if host_budget is None else "offload-graph",
            host_budget=host_budget,
            offload_optimizer=offloaded,
            progress=False,
        )
        self.step: TrainStep = plan.train_step(self.model, loss, self.optimizer, undo=undo)
        for _ in range(steps):
            self()

    def __call__(self) -> Tensor:
        torch.manual_seed(2)
        return self.step(self.x, targets=(self.y,))

    def everything(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def put_back(self, everything: Any) -> None:
        model, optimizer = copy.deepcopy(everything)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def changed(self, before: Any) -> list[str]:
        """Parameters, or buffers, whose values are others than before."""
        now = self.model.state_dict()
        return [name for name, value in before[0].items() if not torch.equal(value, now[name])]


def said(error: BaseException) -> tuple[int, str]:
    """(how many parameters have been updated, the one that may be in part) by an error."""
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    count = re.search(r"after (\d+) of \d+ parameters", text)
    half = re.search(r"been updated, and (.+) or (?:its|their) state perhaps in part", text)
    return int(count[1]) if count else 0, half[1] if half else ""


def check_fault(made: Made, before: Any, error: BaseException) -> None:
    """What the error says is what has changed."""
    updated, half = said(error)
    changed = made.changed(before)
    parameters = {name for name, _ in made.model.named_parameters()}
    whole = [name for name in changed if name in parameters and name != half]
    assert len(whole) == updated
    if not updated and not half:
        assert changed == []
        assert_same(made.optimizer.state_dict(), before[1])


@pytest.mark.parametrize(("offloaded", "steps"), [(False, 0), (True, 1)])
def test_a_fault_at_an_operator(offloaded: bool, steps: int) -> None:
    made = Made(offloaded, steps)
    before = made.everything()
    with FaultAt(0) as whole:
        expected = made()
    after = made.everything()
    messages = set()
    for number in range(1, whole.seen + 1, 4):
        made.put_back(before)
        # As it is, host copies and all, at the begin of a step.
        if made.step._host_state is not None:
            made.step._host_state.leave()
        error: BaseException | None = None
        fault = FaultAt(number)
        try:
            with fault:
                made()
        except (Fault, ExecutionError) as caught:
            error = caught
        if error is None:
            assert fault.seen < number
            continue
        check_fault(made, before, error)
        messages.add(said(error) != (0, ""))
        if messages == {False}:
            # Nothing has changed: the step can simply be repeated.
            assert_same(made(), expected)
            assert_same(made.everything(), after)
    assert messages == {False, True}


def test_state_that_cannot_be_written_back_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(offloaded=True, steps=0)
    before = made.everything()

    def broken(*_: Any) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(HostState, "put_away", broken)
    with pytest.raises(ExecutionError, match="after 1 of 6 parameters") as caught:
        made()
    assert said(caught.value) == (1, "")
    (name,) = made.changed(before)
    # The state that belongs to the updated parameter is there.
    state = made.optimizer.state[dict(made.model.named_parameters())[name]]
    assert state["step"] == 1
    assert state["exp_avg"].abs().sum() > 0
    assert len(made.optimizer.state) == 1


def test_an_update_that_fails_after_it_was_done_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(offloaded=False)
    before = made.everything()
    real = torch.optim.Adam.step

    def failing(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        raise Fault("too late")

    monkeypatch.setattr(torch.optim.Adam, "step", failing)
    with pytest.raises(ExecutionError, match="perhaps in part") as caught:
        made()
    updated, half = said(caught.value)
    assert updated == 0
    # Those that were updated together.
    assert sorted(made.changed(before)) == sorted(half.split(", "))


def test_an_update_that_fails_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(offloaded=False)
    before = made.everything()
    groups = made.optimizer.param_groups

    def failing(*_: Any) -> None:
        raise Fault("at once")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", failing)
        with pytest.raises(Fault):
            made()
    assert made.optimizer.param_groups is groups
    assert_same(made.everything(), before)
    other = Made(offloaded=False)
    assert_same(made(), other())
    assert_same(made.everything(), other.everything())


def test_state_made_in_part_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the memory runs out between two tensors of a parameter's state."""
    made = Made(offloaded=False, steps=0)
    calls = []
    real = torch.zeros_like

    def failing(*arguments: Any, **named: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise Fault("no memory")
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", failing)
        with pytest.raises(Fault):
            made()
    assert not made.optimizer.state
    other = Made(offloaded=False, steps=0)
    assert_same(made(), other())
    assert_same(made.everything(), other.everything())


def test_an_interruption_says_what_has_changed() -> None:
    made = Made(offloaded=False)
    before = made.everything()
    with FaultAt(0) as whole:
        made()
    made.put_back(before)
    with FaultAt(whole.seen - 12, KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as caught:
        made()
    check_fault(made, before, caught.value)
    assert said(caught.value)[0] > 0
    # The step is not thought to be running still.
    made()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_step_can_be_taken_back(offloaded: bool) -> None:
    made = Made(offloaded, steps=2, undo=True)
    with FaultAt(0) as whole:
        made()
    before = made.everything()
    random_state = torch.get_rng_state()
    torch.manual_seed(2)
    begin = torch.get_rng_state()
    with FaultAt(whole.seen - 12), pytest.raises(Fault) as caught:
        made.step(made.x, targets=(made.y,))
    assert caught.value.__notes__ == ["the step was taken back: everything is as before it"]
    assert_same(made.everything(), before)
    assert torch.equal(torch.get_rng_state(), begin)
    torch.set_rng_state(random_state)
    twin = Made(offloaded, undo=False)
    twin.put_back(before)
    assert_same(made(), twin())
    assert_same(made.everything(), twin.everything())


def test_copies_to_take_a_step_back_are_charged_to_the_host_budget() -> None:
    trained = sum(p.nbytes for p in Made(offloaded=False).model.parameters())
    with pytest.raises(ValueError, match=r"undo=True keeps copies of .* on the host"):
        Made(offloaded=False, host_budget=3 * trained, undo=True)
    Made(offloaded=False, host_budget=4 * trained, undo=True)
    Made(offloaded=False, host_budget=1, undo=False)


def test_an_interruption_after_the_end_says_that_the_step_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, other = Made(offloaded=False), Made(offloaded=False)
    real, interruptions = type(made.optimizer).step, [signal.SIGINT]

    def interrupted(self: torch.optim.Optimizer) -> None:
        if interruptions:
            signal.raise_signal(interruptions.pop())
        real(self)

    monkeypatch.setattr(type(made.optimizer), "step", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        made()
    assert "everything is as after it" in caught.value.__notes__[0]
    other()
    assert_same(made.everything(), other.everything())


def test_a_step_that_failed_has_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(6, 6), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 6), torch.randn(64, 6)
    loss = nn.functional.mse_loss
    plan = memopt.plan(
        model,
        x,
        loss_fn=loss,
        targets=(y,),
        optimizer=optimizer,
        strategy="offload-graph",
        budget="min",
        device=memopt.Device(to_host_bytes_per_s=1e12, from_host_bytes_per_s=1e12),
        progress=False,
    )
    assert plan.host_peak_bytes
    step = plan.train_step(model, loss, optimizer)
    real, ended = swap._fill, []

    def slow(target: Any, cell: Any) -> None:
        time.sleep(0.005)
        real(target, cell)
        ended.append(target.nbytes)

    begun: list[int] = []
    submit = swap.ThreadSwap._submit

    def counted(self: Any, copy: Any, outward: bool, *arguments: Any) -> Any:
        if outward:
            begun.append(arguments[0].nbytes)
        return submit(self, copy, outward, *arguments)

    monkeypatch.setattr(swap, "_fill", slow)
    monkeypatch.setattr(swap.ThreadSwap, "_submit", counted)
    with FaultAt(0) as every:
        step(x, targets=(y,))
    for number in range(2, every.seen, every.seen // 8):
        with FaultAt(number), pytest.raises((Fault, memopt.MemoptError)):
            step(x, targets=(y,))
        assert ended == begun
    assert begun

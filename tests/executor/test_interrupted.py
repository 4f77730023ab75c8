"""Steps interrupted at any line, and forked processes: nothing stays behind, the next is right."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt.executor
from memopt.executor import random_state
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap import ThreadSwap
from memopt.executor.worker import Worker
from tests.executor.harness import PROGRAMS, Prepared, is_generator_free, prepare
from tests.faults.injected import AtLine, AtOperator

EXECUTOR = str(Path(memopt.executor.__file__).parent)
NAMES = ("store_all", "recompute_late", "swap_all", "placed")


class Model(nn.Module):
    """Dropout to draw again, statistics, tensors to move."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.3)
        out: Tensor = self.norm(x)
        return out


class Planned:
    """One program of the model, and how a step of it is to end."""

    def __init__(self, program: str) -> None:
        torch.manual_seed(0)
        self.model, self.x = Model(), torch.randn(16, 8)
        self.expected = self.step(self.model)
        self.own: Prepared = prepare(self.model, self.x)
        self.swap = ThreadSwap()
        installed = install(
            self.own.captured,
            self.own.lowering,
            PROGRAMS[program](self.own.graph),
            swap=self.swap,
        )
        runtime = runtime_of(self.own.captured)
        self.module = PlannedModule(self.model, self.own.captured, runtime, installed)
        assert self.equal()

    def step(self, module: nn.Module) -> list[Tensor]:
        """What a step leaves behind; every one begins alike."""
        self.model.zero_grad(set_to_none=True)
        for buffer in self.model.buffers():
            buffer.zero_()
        torch.manual_seed(1)
        output = module(self.x)
        output.square().sum().backward()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return [output.detach(), *gradients, *buffers, torch.get_rng_state()]

    def equal(self) -> bool:
        """Whether a planned step equals the unplanned one."""
        return all(map(torch.equal, self.step(self.module), self.expected))

    def left(self) -> list[str]:
        """What an interrupted step has left behind."""
        found = []
        if self.own.waiting:
            found.append("a step's state")
        self.swap._worker.submit(int).wait()
        if self.swap.account.now_bytes:
            found.append("host copies")
        if random_state._HERE.moved is not None:
            found.append("a generator back in time")
        return found if is_generator_free() else [*found, "the lock"]


at_line = partial(AtLine, folder=EXECUTOR)
at_operator = partial(AtOperator, error=KeyboardInterrupt)


def interrupt_everywhere(planned: Planned, kind: Any, most: int) -> int:
    """Interrupt steps at every line or operator, or `most` of them; how many were interrupted."""
    with kind(0) as whole:
        planned.step(planned.module)
    numbers = range(1, whole.seen + 1)
    if len(numbers) > most:
        numbers = sorted(random.Random(0).sample(numbers, most))
    interrupted = 0
    for number in numbers:
        try:
            with kind(number):
                planned.step(planned.module)
        except KeyboardInterrupt:
            interrupted += 1
        assert planned.left() == [], number
    assert planned.equal()
    return interrupted


@pytest.mark.parametrize("program", NAMES)
def test_nothing_stays_of_a_step_interrupted_at_a_line(program: str) -> None:
    planned = Planned(program)
    assert interrupt_everywhere(planned, at_line, 50) > 40


@pytest.mark.slow
@pytest.mark.parametrize("program", NAMES)
def test_nothing_stays_of_a_step_interrupted_at_any_line(program: str) -> None:
    planned = Planned(program)
    assert interrupt_everywhere(planned, at_line, 10_000) > 200


@pytest.mark.parametrize("program", NAMES)
def test_nothing_stays_of_a_step_interrupted_at_an_operator(program: str) -> None:
    planned = Planned(program)
    assert interrupt_everywhere(planned, at_operator, 25) > 15


def test_a_forward_that_fails_moves_all_or_nothing() -> None:
    """Buffers and random numbers are those from before it, or, if all of it had run, from after."""
    planned = Planned("store_all")

    def moved() -> list[Tensor]:
        return [*(b.clone() for b in planned.model.buffers()), torch.get_rng_state()]

    with AtOperator() as whole:
        planned.module(planned.x)
    for number in range(1, whole.seen + 1):
        before = moved()
        with pytest.raises(KeyboardInterrupt), at_operator(number):
            planned.module(planned.x)
        found = moved()
        same = [torch.equal(a, b) for a, b in zip(found, before, strict=True)]
        assert all(same) or not any(same), number


def test_a_replay_that_fails_gives_the_lock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned("recompute_late")
    real = torch.frombuffer

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "frombuffer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned.step(planned.module)
    monkeypatch.setattr(torch, "frombuffer", real)
    assert planned.left() == []
    assert planned.equal()


def in_child(work: Callable[[], bool]) -> int:
    """The exit code of a forked process: 0 if `work` says so, negative if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 3
        try:
            code = 0 if work() else 2
        except BaseException:  # noqa: BLE001  # shown in the parent's report
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@forks
@pytest.mark.parametrize("program", ["swap_all", "recompute_late", "placed"])
def test_a_forked_child_trains(program: str) -> None:
    planned = Planned(program)
    assert in_child(planned.equal) == 0
    assert planned.equal()


@forks
def test_a_forked_child_runs_the_backward_of_a_step_that_was_under_way() -> None:
    planned = Planned("swap_all")
    planned.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = planned.module(planned.x)

    def backward() -> bool:
        output.square().sum().backward()
        gradients = [p.grad for p in planned.model.parameters() if p.grad is not None]
        return all(map(torch.equal, gradients, planned.expected[1:]))

    assert in_child(backward) == 0
    assert backward()


@forks
def test_a_fork_waits_for_a_replay_in_another_thread() -> None:
    planned = Planned("recompute_late")
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with random_state._lock:
            held.set()
            forked.wait(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    code = in_child(planned.equal)
    forked.set()
    thread.join()
    assert code == 0
    assert planned.equal()


def test_a_worker_runs_its_tasks_in_order_and_raises_what_they_raise() -> None:
    worker = Worker("test")
    seen: list[int] = []

    def fail() -> None:
        raise ValueError("no link")

    tasks = [worker.submit(seen.append, i) for i in range(100)]
    failed = worker.submit(fail)
    worker.settle()
    assert seen == list(range(100))
    for task in tasks:
        task.result()
    with pytest.raises(ValueError, match="no link"):
        failed.result()
    failed.result()
    thread = worker._thread
    assert thread is not None
    del worker
    thread.join(10)
    assert not thread.is_alive()

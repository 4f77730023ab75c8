"""Steps that are not carried through: by the user's code, other threads and processes, and a
process that has no memory left."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memopt.errors import ExecutionError
from memopt.executor.module import PlannedModule
from tests.executor.harness import prepare
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import Injected, error_of
from tests.faults.states import State
from tests.faults.step_faults import AFTER_FORWARD
from tests.faults.subjects import DropIn, adam, batch, drop_in, prepared, programs


def for_every_program(room: Room, run: Callable[[DropIn], object]) -> int:
    """Do something to the step of each program; it checks itself, and so does the next step."""
    for program in programs(room):
        one = drop_in(program)
        run(one)
        one.check_next()
    return len(programs(room))


@fault(Part.STEP, "backward is never called", f"memory returns with the output; {AFTER_FORWARD}")
def no_backward(room: Room) -> int:
    def run(one: DropIn) -> None:
        assert one.fails(step=lambda: one.forward(nullcontext())) is None

    return for_every_program(room, run)


@fault(Part.STEP, "the user's loss fails", f"its own error; {AFTER_FORWARD}")
def loss_fails(room: Room) -> int:
    def attempt(one: DropIn) -> None:
        output = one.module(batch()[0])
        raise Injected(f"loss of {tuple(output.shape)}")

    def run(one: DropIn) -> None:
        assert isinstance(one.fails(step=lambda: attempt(one)), Injected)

    return for_every_program(room, run)


def hooked(one: DropIn, target: str) -> None:
    """A backward in which a hook of the user's fails: on the output, or on a parameter."""
    output = one.module(batch()[0])

    def fail(_: Any) -> None:
        raise Injected(f"hook on the {target}")

    parameter = next(one.model.parameters())
    on = output if target == "output" else parameter
    handle = on.register_hook(fail)
    try:
        output.square().sum().backward()
    finally:
        handle.remove()


@fault(Part.STEP, "a hook on the output's gradient fails", f"its own error; {AFTER_FORWARD}")
def output_hook(room: Room) -> int:
    def run(one: DropIn) -> None:
        assert isinstance(one.fails(step=lambda: hooked(one, "output")), Injected)

    return for_every_program(room, run)


@fault(Part.STEP, "a hook on a parameter's gradient fails", f"its own error; {AFTER_FORWARD}")
def parameter_hook(room: Room) -> int:
    def run(one: DropIn) -> None:
        assert isinstance(one.fails(step=lambda: hooked(one, "parameter")), Injected)

    return for_every_program(room, run)


@fault(Part.STEP, "backward is called twice", f"an error that says so; {AFTER_FORWARD}")
def twice(room: Room) -> int:
    def attempt(one: DropIn) -> None:
        loss = one.forward(nullcontext())
        loss.backward()
        loss.backward()

    def run(one: DropIn) -> None:
        error = one.fails(step=lambda: attempt(one))
        assert "second time" in str(error) or isinstance(error, ExecutionError), error

    return for_every_program(room, run)


@fault(
    Part.STEP,
    "a parameter is changed between forward and backward",
    f"an error that names it, instead of wrong gradients; {AFTER_FORWARD}",
)
def changed_parameter(room: Room) -> int:
    def run(one: DropIn) -> None:
        def attempt() -> None:
            loss = one.forward(nullcontext())
            with torch.no_grad():
                # Of the same values: only that it was written to can be known.
                one.model.middle.weight.copy_(one.model.middle.weight.clone())
            loss.backward()

        error = one.fails(step=attempt)
        assert isinstance(error, ExecutionError)
        assert "middle.weight was changed in place" in str(error)

    return for_every_program(room, run)


@fault(
    Part.STEP,
    "an input is changed between forward and backward",
    f"an error that says so, instead of wrong gradients; {AFTER_FORWARD}",
)
def changed_input(room: Room) -> int:
    def run(one: DropIn) -> None:
        x = batch()[0].clone()

        def attempt() -> None:
            loss = one.module(x).sum()
            x.mul_(1.0)
            loss.backward()

        error = one.fails(step=attempt)
        assert isinstance(error, ExecutionError)
        assert "was changed in place" in str(error)

    return for_every_program(room, run)


@fault(
    Part.STEP,
    "the planned module is collected between forward and backward",
    "the backward runs and is right; memory returns",
)
def collected(_room: Room) -> int:
    model = prepared().model
    planned: PlannedModule | None = prepared().planned("recompute_late")
    assert planned is not None
    begin = State.of(model, adam(model))
    model(batch()[0]).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    begin.into(model, adam(model))
    model.zero_grad(set_to_none=True)
    loss: Tensor = planned(batch()[0]).square().sum()
    gone = weakref.ref(planned)
    planned = None
    gc.collect()
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))
    model.zero_grad(set_to_none=True)
    del loss, found
    gc.collect()
    assert gone() is None
    assert prepared().waiting == 0
    begin.into(model, adam(model))
    return 1


@fault(Part.STEP, "another thread's step fails meanwhile", "this thread's step is right")
def other_thread(room: Room) -> int:
    def run(one: DropIn) -> None:
        begin, after = one.now(), one.after()
        loss = one.forward(nullcontext())
        moved = torch.get_rng_state()
        buffers = {name: value.clone() for name, value in one.model.named_buffers()}
        errors: list[BaseException | None] = []

        def fail() -> None:
            errors.append(error_of(lambda: hooked(one, "output")))

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        assert isinstance(errors[0], Injected)
        # Its forward has moved them once more, as it would in eager.
        torch.set_rng_state(moved)
        one.model.load_state_dict(buffers, strict=False)
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=True)
        one.check_same(one.now(), after)
        begin.into(one.model, one.optimizer)

    return for_every_program(room, run)


@fault(
    Part.STEP,
    "a forked process is killed in its step",
    "the step of this process goes on and is right",
)
def killed_child(room: Room) -> int:
    def run(one: DropIn) -> None:
        begin, after = one.now(), one.after()
        loss = one.forward(nullcontext())
        child = os.fork()
        if child == 0:
            try:
                one.forward(nullcontext())
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=True)
        one.check_same(one.now(), after)
        begin.into(one.model, one.optimizer)

    return for_every_program(room, run)


class Large(nn.Module):
    """Activations of 40 MiB each: malloc takes what is larger than 32 MiB never from its heap,
    where earlier tests may have left room."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@fault(
    Part.STEP,
    "the process has no address space left",
    "torch's own error; the step works again when there is memory",
    slow=True,
)
def address_space(room: Room) -> int:
    torch.manual_seed(0)
    model = Large()
    x = torch.randn(5 * 2**15, 64)
    own = prepare(model, x)
    planned = own.planned("recompute_late")
    planned(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    free, hard = resource.getrlimit(resource.RLIMIT_AS)
    happened = 0
    for megabytes in range(5, 120, 5 if room.everywhere else 30):
        model.zero_grad(set_to_none=True)
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, hard))
        try:
            error = error_of(lambda: planned(x).backward())
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (free, hard))
        if error is not None:
            assert "allocate" in str(error) or isinstance(error, MemoryError), error
            happened += 1
        assert own.waiting == 0
    model.zero_grad(set_to_none=True)
    planned(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))
    return happened

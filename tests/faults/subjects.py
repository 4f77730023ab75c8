"""Small planned trainings to inject faults into: modules under five kinds of programs, and whole
steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memopt
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.recorder import Recorder
from memopt.executor.swap import ThreadSwap
from memopt.executor.swap_streams import StreamSwap
from memopt.executor.train_step import TrainStep
from memopt.executor.values import place_host_copies
from memopt.executor.worker import Task
from tests.executor.harness import PROGRAMS, Prepared, prepare
from tests.faults.fault import Room
from tests.faults.injected import Injected
from tests.faults.states import Subject

DROP_IN = ("store_all", "recompute_late", "swap_all", "placed", "streams")
LOSS = nn.functional.cross_entropy


def programs(room: Room) -> tuple[str, ...]:
    """Which programs faults are injected into."""
    return DROP_IN if room.everywhere else ("recompute_late", "swap_all", "streams")


class Model(nn.Module):
    """Dropout to draw again, statistics of two norms, tensors to move and to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norms[0](self.first(x)).tanh(), 0.3)
        x = self.norms[1](self.middle(x)).sigmoid()
        out: Tensor = self.last(x)
        return out


def built() -> Model:
    torch.manual_seed(0)
    return Model()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=numbers)
    return x, torch.randint(0, 3, (16,), generator=numbers)


def trained(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """A step of an ordinary loop: the loss and the gradients."""
    x, y = batch()
    loss = LOSS(module(x), y)
    loss.backward()
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad.clone() for p in owned if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients]


def eager(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """`trained`, for a twin."""
    return trained(model, optimizer)


class HostStreams:
    """Streams of a device that is the host: whatever is asked for happens at once."""

    def here(self) -> str:
        return "compute"

    def mark(self, home: Any) -> str:
        return "event"

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any]) -> str:
        target.copy_(source)
        return "event"

    def wait(self, event: Any, home: Any) -> None:
        """All is over."""

    def device_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.from_numpy(bytearray_of(size_bytes))


def bytearray_of(size_bytes: int) -> Any:
    """Memory that is not torch's, as pinned memory is not the device's."""
    import numpy as np

    return np.empty(size_bytes, dtype=np.uint8)


class HoldingSwap(ThreadSwap):
    """Holds what its thread copies until it is asked for: what dies on the thread torch's profiler
    would not see."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__(recorder)
        self.held: list[Any] = []

    def _submit(self, copy: Callable[..., None], outward: bool, *arguments: Any) -> Task:
        self.held += arguments[outward]
        return super()._submit(copy, outward, *arguments)

    def release(self) -> None:
        """Let go, once the thread does nothing any more."""
        # The worker may hold the last task for a moment: a further task ends after it.
        self._worker.submit(int).wait()
        self.held.clear()


@functools.cache
def prepared() -> Prepared:
    """The model, captured once for all programs."""
    return prepare(built(), batch()[0])


class DropIn(Subject):
    """A module under one program, trained by a loop."""

    def __init__(self, program: str) -> None:
        own = prepared()
        model = own.model
        made = PROGRAMS["swap_all" if program == "streams" else program](own.graph)
        self.streams = HostStreams()
        self.swap: Any = HoldingSwap()
        if program == "streams":
            pool_bytes = place_host_copies(own.graph, made).extent_bytes
            self.swap = StreamSwap(self.streams, pool_bytes)
        installed = install(own.captured, own.lowering, made, swap=self.swap)
        runtime = runtime_of(own.captured)
        self.module: PlannedModule = PlannedModule(model, own.captured, runtime, installed)
        optimizer = adam(model)
        super().__init__(
            model=model,
            optimizer=optimizer,
            step=lambda: trained(self.module, optimizer),
            eager=eager,
            host_bytes=self.host_copies,
            waiting=lambda: own.waiting,
        )

    def host_copies(self) -> int:
        if isinstance(self.swap, HoldingSwap):
            self.swap.release()
        return int(self.swap.account.now_bytes)

    def forward(self, injection: AbstractContextManager[Any]) -> Tensor:
        """The forward alone, with a fault in it; the loss."""
        x, y = batch()
        with injection:
            output = self.module(x)
        return LOSS(output, y)

    def backward(self, injection: AbstractContextManager[Any]) -> None:
        """A step without its update, with a fault in the backward."""
        loss = self.forward(nullcontext())
        with injection:
            loss.backward()


@functools.cache
def drop_in(program: str) -> DropIn:
    return DropIn(program)


class Whole(Subject):
    """A whole planned step."""

    def __init__(
        self,
        undo: bool,
        offloaded: bool,
        strategy: str = "olla",
        wants_input: bool = False,
        renewed: int = 0,
        **more: Any,
    ) -> None:
        model = built()
        optimizer = adam(model)
        x, y = batch()
        x = self.x = x.clone().requires_grad_(wants_input)
        plan = memopt.plan(
            model,
            x,
            loss_fn=LOSS,
            targets=(y,),
            optimizer=optimizer,
            strategy=strategy,
            whole_step=True,
            offload_optimizer=offloaded,
            progress=False,
            **more,
        )
        self.train: TrainStep = plan.train_step(model, LOSS, optimizer, undo=undo)
        super().__init__(
            model=model,
            optimizer=optimizer,
            step=self.run,
            eager=self.looped,
            host_bytes=lambda: 0,
            waiting=lambda: 0,
            # The counters of state on the host.
            renewed_bytes=4 * (len([*model.parameters()]) if offloaded else renewed),
        )

    def run(self) -> list[Tensor]:
        found = [self.train(self.x, targets=(batch()[1],))]
        self.x.grad = None
        return found

    def looped(self, model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        """The step without a plan."""
        return trained(model, optimizer)[:1]

    def run_with(self, injection: AbstractContextManager[Any]) -> None:
        """A step with a fault in it."""
        with injection:
            self.run()

    def hooked(self) -> None:
        """A step in which a hook of the user's on the input's gradient fails."""

        def fail(_: Tensor) -> None:
            raise Injected("hook on the input")

        handle = self.x.register_hook(fail)
        try:
            self.run()
        finally:
            handle.remove()


class Accumulating(Whole):
    """A whole planned step over two micro-batches, clipped, whose parameters and state come from
    the host."""

    def __init__(self) -> None:
        with mock.patch("memopt.executor.install.ThreadSwap", HoldingSwap):
            super().__init__(
                undo=True,
                offloaded=False,
                strategy="offload-graph",
                # The counters of ten parameters' state, and the norm.
                renewed=11,
                micro_batches=2,
                clip_norm=0.1,
                movable="all",
                budget="min",
                device=memopt.Device(to_host_bytes_per_s=5e9),
            )
        assert self.train.host_bytes
        self.host_bytes = self.let_go

    def let_go(self) -> int:
        """Of what the thread has copied; the host memory is the step's, from its first one on."""
        swap = self.train._homes.swap
        assert isinstance(swap, HoldingSwap)
        swap.release()
        return 0

    def run(self) -> list[Tensor]:
        x, y = batch()
        return [self.train.accumulate([(x, y), (x + 1, y)])]

    def looped(self, model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        x, y = batch()
        losses = []
        for one in (x, x + 1):
            losses.append(LOSS(model(one), y))
            (losses[-1] / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [torch.stack(losses).detach()]


@functools.cache
def accumulating() -> Accumulating:
    return Accumulating()


@functools.cache
def whole(undo: bool, offloaded: bool = False, strategy: str = "olla") -> Whole:
    more = {"budget": "min"} if strategy != "olla" else {}
    return Whole(undo, offloaded, strategy, **more)

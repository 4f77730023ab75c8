"""Steps that overlap on two streams of the device, and what is wrong with them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from memopt.executor.values import place_host_copies
from memopt.programs.instructions import Program
from tests.device import accelerator
from tests.device.harness import delayed, same, settled
from tests.executor.harness import Prepared, prepare, recompute_late, swap_all
from tests.random_programs import random_program


class Layers(nn.Module):
    """Without buffers: steps on two streams share nothing that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.first(x)).tanh(), 0.3)
        return nn.functional.dropout((self.second(hidden) + x).sigmoid(), 0.2)


@functools.cache
def prepared() -> Prepared:
    torch.manual_seed(0)
    device = torch.device("fake:0")
    return prepare(Layers().to(device), torch.randn(32, 48).to(device))


@functools.cache
def _batch() -> Tensor:
    return torch.linspace(-1, 1, 32 * 48).reshape(32, 48).to("fake:0")


def generated(seed: int) -> Program:
    """A valid program that moves and recomputes at random."""
    return random_program(Random(seed), prepared().graph, recomputations=4, swaps=8)


@functools.cache
def programs() -> tuple[Program, ...]:
    """Everything moved, all recomputed, and some at random."""
    graph = prepared().graph
    return (swap_all(graph), recompute_late(graph), generated(0), generated(1))


def planned(
    program: Program,
    *,
    streams: type[DeviceStreams] = DeviceStreams,
    swap: type[StreamSwap] = StreamSwap,
    interpreted: bool = False,
) -> tuple[PlannedModule, DeviceStreams]:
    """The model under a program, and the streams that it runs with."""
    own = prepared()
    device = torch.device("fake:0")
    own_streams = streams(device)
    pool_bytes = place_host_copies(own.graph, program).extent_bytes
    installed = install(
        own.captured,
        own.lowering,
        program,
        interpreted=interpreted,
        swap=swap(own_streams, pool_bytes, None, device),
    )
    module = PlannedModule(own.model, own.captured, runtime_of(own.captured), installed)
    return module, own_streams


def steps(module: nn.Module) -> Iterator[list[Tensor]]:
    """The gradients of overlapping steps, and of forwards that have no backward, on two streams
    that never wait for each other."""
    model = prepared().model
    x = _batch()
    here, other = accelerator.mod.default_stream(0), accelerator.mod.Stream(0)
    settled()

    def forward(seed: int) -> Tensor:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        loss: Tensor = module(x).square().sum()
        return loss

    def step(seed: int) -> list[Tensor]:
        forward(seed).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    for stream, seed in ((here, 1), (other, 2), (here, 3), (other, 4)):
        with accelerator.mod.stream(stream):
            yield step(seed)
    for stream, seed in ((here, 5), (other, 6), (here, 7)):
        with accelerator.mod.stream(stream):
            yield step(seed)
            left = forward(seed)
        if stream is other:
            del left  # under another stream than it was made on
    yield step(8)


@functools.cache
def eager() -> list[list[Tensor]]:
    """Without memopt; the values are on the host."""
    found = list(steps(prepared().model))
    settled()
    return [[one.cpu() for one in step] for step in found]


LATE = ((200, 200, None), (0, 600, None), (300, 0, None), (0, 0, "_out"), (0, 0, "_in"))
"""Delays, and the copy stream that lags behind all others."""


def complaints(program: Program, **how: Any) -> list[str]:
    """What is wrong with steps of a program, whatever is late."""
    expected, found = eager(), []
    module, streams = planned(program, **how)
    for default_us, side_us, lagging in LATE:
        late = f"{lagging} late" if lagging else f"delays {default_us}, {side_us} µs"
        if lagging:
            accelerator.lag(0, getattr(streams, lagging).stream_id, 2000)
        with delayed((default_us, side_us)):
            before, states, got = accelerator.counts()[2], [], []
            for step in steps(module):
                got.append(step)
                states.append(accelerator.generator(0).get_state())
            # `steps` waits for all itself, once a device.
            waits = accelerator.counts()[2] - before - accelerator.mod.device_count()
            settled()
        if lagging:
            accelerator.lag(0, getattr(streams, lagging).stream_id, 0)
        if waits:
            found.append(f"the host waits {waits} times")
        found += [
            f"step {number} differs with {late}"
            for number, (one, two) in enumerate(zip(got, expected, strict=True))
            if not same([value.cpu() for value in one], two)
        ]
        if not all(map(torch.equal, states, _states())):
            found.append("the generator is not where eager leaves it")
        del got
    return found


@functools.cache
def _states() -> list[Tensor]:
    return [accelerator.generator(0).get_state() for _ in steps(prepared().model)]

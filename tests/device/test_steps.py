"""Steps as training loops run them, on the device: whole steps, streams of one's own, failures."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor.module import PlannedModule
from tests.device import accelerator
from tests.device.harness import DELAYS, LINK, Net, Subject, delayed, net, same, settled
from tests.device.test_plans import BY_WAY, WAYS

LOSS = nn.functional.cross_entropy
subject = functools.lru_cache(1)(net)


@functools.lru_cache(8)
def planned(way: str) -> PlannedModule:
    plan = memopt.plan(subject().profiled, progress=False, **WAYS[way])
    return plan.apply(subject().model)


SLOW = memopt.Device(to_host_bytes_per_s=1e5)
"""So slow that it pays to leave something on the device, or to let the host update it."""
WHOLE: dict[str, dict[str, Any]] = {
    "olla": {"strategy": "olla", "time_limit_s": 1},
    "state on the host": {"strategy": "olla", "time_limit_s": 1, "offload_optimizer": True},
    "all moved": {"strategy": "offload-graph", "budget": 0.6, "movable": "all"},
    "steady": {
        "strategy": "offload-graph",
        "budget": 0.65,
        "movable": "all",
        "steady_state": True,
        "device": SLOW,
    },
    "micro-batches": {"strategy": "store-all", "micro_batches": 2, "clip_norm": 0.5},
    "activations": {"strategy": "offload-graph", "budget": "min"},
}
MOVED = ("state on the host", "all moved", "steady")
"""Their steps end when the host can read what moved: one wait."""


class Whole:
    """A model whose whole step is planned as `asked`, and eager's twin."""

    def __init__(self, asked: dict[str, Any], rows: int = 64, **how: Any) -> None:
        torch.manual_seed(1)
        self.model = Net().to("fake:0")
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.eager = (
            torch.optim.AdamW(one.parameters(), lr=0.01) for one in (self.model, self.twin)
        )
        self.x, self.y = torch.randn(rows, 16).to("fake:0"), (torch.arange(rows) % 10).to("fake:0")
        self.count, self.clip = asked.get("micro_batches", 1), asked.get("clip_norm")
        plan = memopt.plan(
            self.model,
            self.x,
            loss_fn=LOSS,
            targets=(self.y,),
            optimizer=self.optimizer,
            progress=False,
            **({"whole_step": True, "device": LINK} | asked),
        )
        self.plan, self.step = plan, plan.train_step(self.model, LOSS, self.optimizer, **how)

    def run(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        if self.count > 1:
            return self.step.accumulate([(self.x, self.y)] * self.count)
        return self.step(self.x, targets=(self.y,))

    def expected(self, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(self.count):
            (LOSS(self.twin(self.x), self.y) / self.count).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
        self.eager.step()
        self.eager.zero_grad()

    def differs(self) -> list[str]:
        settled()
        pairs = zip(self.model.named_parameters(), self.twin.parameters(), strict=True)
        found = [name for (name, one), two in pairs if not torch.equal(one.cpu(), two.cpu())]
        for name, one in self.model.named_parameters():
            state = self.optimizer.state[one]
            for key, value in self.eager.state[self.twin.get_parameter(name)].items():
                if not torch.equal(state[key].cpu(), value.cpu()):
                    found.append(f"{key} of {name}")
        return found


def test_a_backward_that_runs_again_has_its_own_host_copies(device: torch.device) -> None:
    one, module = subject(), planned("offload")
    wanted = one.grads()
    with delayed((0, 600)):
        one.begin()
        loss = one.loss(one.call(module, one.inputs))
        for again in (True, True, False):
            one.model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=again)
            assert same(one.left(), wanted)


@pytest.mark.parametrize("way", WHOLE)
def test_whole_steps_equal_eagers_and_the_host_never_waits(way: str, device: torch.device) -> None:
    one = Whole(WHOLE[way], rows=8 if way == "steady" else 64)
    for seed, most in enumerate(DELAYS):
        with delayed(most):
            before = accelerator.counts()[2]
            one.run(seed)
            waits = accelerator.counts()[2] - before
        one.expected(seed)
        if seed:  # pinned memory is taken in the first step
            assert waits <= (way in MOVED)
    assert one.differs() == []
    assert bool(one.step.host_bytes) == (way in ("all moved", "steady"))
    assert bool(one.step._homes.carried) == (way == "steady")


@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits(way: str, device: torch.device) -> None:
    module = planned(way)
    subject().grads(module)
    before = accelerator.counts()
    for _ in range(2):
        subject().step(module)
    after = accelerator.counts()
    assert after[2] == before[2], {k: v - before[3].get(k, 0) for k, v in after[3].items()}


@pytest.mark.parametrize("both", [True, False], ids=["forward and backward", "forward"])
@pytest.mark.parametrize("way", BY_WAY)
def test_on_a_stream_of_ones_own(way: str, both: bool, device: torch.device) -> None:
    one, module = subject(), planned(way)
    wanted = one.grads()
    for most in DELAYS:
        with delayed(most):
            one.begin()
            side = accelerator.mod.Stream(device)
            side.wait_stream(torch.accelerator.current_stream())
            with accelerator.mod.stream(side):
                loss = one.loss(module(*one.inputs))
                if both:
                    loss.backward()
            torch.accelerator.current_stream().wait_stream(side)
            if not both:
                loss.backward()
            assert same(one.left(), wanted)


@pytest.mark.parametrize("way", BY_WAY)
def test_two_steps_under_way(way: str, device: torch.device) -> None:
    one, module = subject(), planned(way)
    wanted = [one.grads(seed=seed) for seed in (1, 2)]
    losses = []
    with delayed((300, 300)):
        one.begin()
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(one.loss(module(*one.inputs)))
        for number in (1, 0):
            one.model.zero_grad(set_to_none=True)
            losses[number].backward()
            assert same(one.left(), wanted[number])


@pytest.mark.parametrize("way", BY_WAY)
def test_out_of_memory_at_every_allocation(way: str, device: torch.device) -> None:
    one, module = subject(), planned(way)
    wanted, failed = one.grads(module), 0
    one.begin()
    settled()
    before = accelerator.mod.memory_allocated()
    for number in range(1, 400):
        one.begin()
        accelerator.fail_in(0, number)
        try:
            one.step(module)
        except torch.OutOfMemoryError:
            failed += 1
        else:
            accelerator.fail_in(0, 0)
            break
        if number % 20 == 0:
            assert same(one.grads(module), wanted), number
            one.begin()
            settled()
            assert accelerator.mod.memory_allocated() == before, number
    assert failed > 10
    assert same(one.grads(module), wanted)
    assert same(one.grads(), wanted)


@pytest.mark.parametrize("way", BY_WAY)
def test_interrupted(way: str, device: torch.device) -> None:
    one, module = subject(), planned(way)
    wanted = one.grads(module)
    interrupted = 0
    for number in range(8):
        one.begin()
        timer = threading.Timer(0.006 * number, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with delayed((200, 200)):
                timer.start()
                for _ in range(50):
                    one.step(module)
                time.sleep(5)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert same(one.grads(module), wanted), number
    assert interrupted == 8


def test_models_on_two_devices_in_two_threads(device: torch.device) -> None:
    def made(place: str) -> tuple[Subject, Any]:
        one = net(place, dropout=0.0)
        plan = memopt.plan(one.profiled, progress=False, **WAYS["offload"])
        return one, plan.apply(one.model)

    ones = [made("fake:0"), made("fake:1")]
    wanted = [one.grads() for one, _ in ones]
    for one, _ in ones:
        one.begin()
    settled()

    def train(one: Subject, module: Any) -> None:
        for _ in range(5):
            one.model.zero_grad(set_to_none=True)
            one.step(module)

    with delayed((200, 400)):
        threads = [threading.Thread(target=train, args=pair) for pair in ones]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(one.left(), w) for (one, _), w in zip(ones, wanted, strict=True))
    gc.collect()

"""What DeepSpeed's engine puts around a model, by stand-ins: DeepSpeed is no dependency."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memopt


def test_hooks_of_deepspeeds_engine_run_around_planned_calls() -> None:
    # They start and stop timers, which no graph can hold.
    begun, ended = [], []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(time.time())

    def after(_: nn.Module, args: Any, output: Any) -> None:
        ended.append(time.time())

    before.__module__ = after.__module__ = "deepspeed.runtime.engine"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    inputs = torch.randn(16, 8)
    model(inputs).sum().backward()
    expected = [one.grad for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    memopt.wrap(model, "min", progress=False)
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    model(inputs).sum().backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    assert len(found) == 4
    assert all(map(torch.equal, expected, found))
    assert memopt.running(model).calls.planned == len(begun) == len(ended) == 1


class _ZeroOptimizer:
    """Holds what DeepSpeed's does: parameters in one piece, master weights, the state of a part."""

    def __init__(self, model: nn.Module) -> None:
        own = [one.detach() for one in model.parameters()]
        self.flat = torch.cat([one.flatten() for one in own])
        parts = self.flat.split([one.numel() for one in own])
        for one, part in zip(model.parameters(), parts, strict=True):
            one.data = part.view_as(one)
        self.master = nn.Parameter(self.flat.to(torch.float64))
        self.optimizer = torch.optim.AdamW([self.master])
        self.groups = [list(model.parameters())]
        self.reduce_bucket_size, self.partition_size, self.overlap_comm = 100, [200], True


_ZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


def test_what_deepspeeds_optimizer_holds_is_charged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    inputs = torch.randn(16, 8)
    wrapped = memopt.wrap(model, "min", progress=False)
    wrapped(inputs).sum().backward()
    (alone,) = memopt.running(model).plans
    model.zero_grad()
    engine = SimpleNamespace(optimizer=_ZeroOptimizer(model))

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        assert engine.optimizer is not None

    before.__module__ = "deepspeed.runtime.engine"
    model.register_forward_pre_hook(before, with_kwargs=True)
    elements = engine.optimizer.flat.numel()
    resident = []
    for steps in range(2):
        wrapped(inputs).sum().backward()
        engine.optimizer.master.grad = torch.zeros_like(engine.optimizer.master)
        if steps == 0:
            resident.append(max(one.resident_bytes for one in memopt.running(model).plans))
        engine.optimizer.optimizer.step()
        engine.optimizer.master.grad = None
        model.zero_grad()
    wrapped(inputs).sum().backward()
    resident.append(max(one.resident_bytes for one in memopt.running(model).plans))
    assert resident[0] == alone.resident_bytes + 8 * elements
    state_bytes = 2 * 8 * elements + 4  # two moments, a number of steps
    assert resident[1] == resident[0] + state_bytes
    # The model's own gradients are charged already where a micro-batch comes after another.
    wrapped(inputs).sum().backward()
    assert memopt.running(model).around.certain().state_bytes == 8 * elements + state_bytes
    # Buckets are there with all gradients, when the backward has run and its peak is over.
    assert all(one.budget == one.peak_bytes for one in memopt.running(model).plans)
    model.zero_grad()
    engine.optimizer.reduce_bucket_size = 10000
    wrapped(inputs).sum().backward()
    plan = memopt.running(model).plans[-1]
    gradients_bytes = sum(one.nbytes for one in model.parameters())
    output_bytes = 4 * 16 * 4
    most_bytes = gradients_bytes + output_bytes + 2 * 4 * 10000
    assert plan.budget == plan.resident_bytes + most_bytes
    # Those that a micro-batch has left are charged once.
    engine.optimizer.buffers = [torch.empty(10000) for _ in range(2)]
    model.zero_grad()
    wrapped(inputs).sum().backward()
    charged = memopt.running(model).around.certain()
    assert (charged.update_bytes, charged.state_bytes) == (0, 8 * elements + state_bytes + 80000)


class _Parts(nn.Sequential):
    """Reads a value behind its first block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        return super().forward(x * (1 + (x.sum().item() > 1e9)))


@pytest.mark.filterwarnings("ignore:.*can.* be captured as one graph")
def test_buckets_are_there_while_other_parts_of_a_model_await_their_backward() -> None:
    def peak_bytes(bucket_size: int) -> int | None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
        model = _Parts(*blocks)
        engine = SimpleNamespace(optimizer=_ZeroOptimizer(model))
        engine.optimizer.reduce_bucket_size, engine.optimizer.overlap_comm = bucket_size, False

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            assert engine.optimizer is not None

        before.__module__ = "deepspeed.runtime.engine"
        memopt.wrap(model, "min", "store-all", parts="auto", progress=False)
        model.register_forward_pre_hook(before, with_kwargs=True)
        for _ in range(4):
            model(torch.ones(16, 8)).sum().backward()
            model.zero_grad()
        found: int | None = memopt.running(model).parts.shared.peak_bytes()
        return found

    small, large = map(peak_bytes, (200, 10200))
    assert small is not None
    # In a small one not all gradients fit: it may be half empty beside a partition's.
    assert large == small + 4 * (10200 - 400)


def test_buckets_that_a_version_does_not_name_are_warned_of_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = _ZeroOptimizer(model)
    del optimizer.reduce_bucket_size
    engine = SimpleNamespace(optimizer=optimizer)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        assert engine.optimizer is not None

    before.__module__ = "deepspeed.runtime.engine"
    wrapped = memopt.wrap(model, "min", progress=False)
    model.register_forward_pre_hook(before, with_kwargs=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            wrapped(torch.randn(16, 8)).sum().backward()
    own = [str(one.message) for one in warned if "DeepSpeed" in str(one.message)]
    assert len(own) == 1
    assert "no reduce_bucket_size" in own[0]

"""The accelerator is what its sources say, seen through torch's own interface."""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.device import accelerator


def test_host_access_to_device_memory_ends_the_process(device: torch.device) -> None:
    child = os.fork()
    if not child:
        ctypes.string_at(torch.ones(4, device=device).data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_work_is_queued(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    accelerator.mod.synchronize()
    accelerator.delay(20000)
    done = torch.Event("fake")
    begin = accelerator.counts()
    for _ in range(20):
        x = x @ x
    done.record()
    assert not done.query()
    after = accelerator.counts()
    assert after[0] - begin[0] >= 20
    assert after[1:] == begin[1:]


def copied(device: torch.device, waits: bool) -> int:
    """How many of twenty copies to the host, on another stream, are wrong."""
    side, wrong = accelerator.mod.Stream(device), 0
    for value in range(20):
        x = torch.full((1000,), float(value), device=device)
        host = torch.empty(1000, pin_memory=True)
        if waits:
            side.wait_stream(torch.accelerator.current_stream())
        with accelerator.mod.stream(side):
            host.copy_(x, non_blocking=True)
        done = side.record_event()
        if waits:
            torch.accelerator.current_stream().wait_event(done)
        del x
        torch.full((1000,), -1.0, device=device)
        done.synchronize()
        wrong += not bool((host == value).all())
    return wrong


def test_streams_are_ordered_by_events_alone(device: torch.device) -> None:
    accelerator.delay(1000)
    assert copied(device, waits=True) == 0
    assert copied(device, waits=False) > 0


def test_what_is_freed_is_overwritten_in_the_order_of_its_stream(device: torch.device) -> None:
    side = accelerator.mod.Stream(device)
    x = torch.ones(1000, device=device)
    accelerator.mod.synchronize()
    accelerator.delay(0, 30000)
    with accelerator.mod.stream(side):
        for _ in range(40):
            late = x + 1
    y = x + 1
    del x
    assert bool((y == 2).all())
    accelerator.mod.synchronize()
    assert not bool((late == 2).any())


def test_memory_marked_for_another_stream_is_kept_for_it(device: torch.device) -> None:
    side = accelerator.mod.Stream(device)
    x = torch.ones(1000, device=device)
    accelerator.mod.synchronize()
    accelerator.delay(0, 30000)
    with accelerator.mod.stream(side):
        for _ in range(40):
            late = x + 1
    before = accelerator.recorded()
    x.record_stream(side)
    address = x.data_ptr()
    del x
    assert accelerator.recorded() == before + 1
    others = [torch.empty(1000, device=device) for _ in range(3)]
    assert address not in [one.data_ptr() for one in others]
    accelerator.mod.synchronize()
    assert bool((late == 2).all())
    assert torch.empty(1000, device=device).data_ptr() == address


def test_allocator(device: torch.device) -> None:
    known = accelerator.mod
    known.reset_peak_memory_stats()
    before = known.memory_allocated()
    one, two = (torch.empty(100, dtype=torch.uint8, device=device) for _ in range(2))
    assert known.memory_allocated() - before == 1024
    address = one.data_ptr()
    del one
    assert known.memory_allocated() - before == 512
    assert known.max_memory_allocated() - before == 1024
    side = known.Stream(device)
    with known.stream(side):
        assert torch.empty(100, dtype=torch.uint8, device=device).data_ptr() != address
    assert torch.empty(100, dtype=torch.uint8, device=device).data_ptr() == address
    del two
    free, _ = known.mem_get_info()
    with known.stream(side):
        large = torch.empty(free - 2**20, dtype=torch.uint8, device=device)
    del large
    # Another stream's free memory is returned when nothing else is left.
    assert torch.empty(free - 2**20, dtype=torch.uint8, device=device).numel()


def test_out_of_memory(device: torch.device) -> None:
    accelerator.limit(0, accelerator.mod.memory_allocated() + 2**20)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 2097152 bytes"):
        torch.empty(2**21, dtype=torch.uint8, device=device)
    torch.empty(2**21, dtype=torch.uint8, device="fake:1")
    accelerator.limit(0, 0)
    accelerator.fail_in(0, 2)
    torch.empty(2**21, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="as asked for"):
        torch.empty(1, dtype=torch.uint8, device=device)
    torch.empty(2**21, dtype=torch.uint8, device=device)


def test_pinned_memory(device: torch.device) -> None:
    now, _ = accelerator.pinned()
    accelerator.reset_pinned_peak()
    host = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    assert host.is_pinned()
    assert accelerator.pinned() == (now + 8192, now + 8192)
    x = torch.ones(5000, dtype=torch.uint8, device=device)
    accelerator.mod.synchronize()
    accelerator.delay(30000)
    for _ in range(20):
        host.copy_(x, non_blocking=True)
    address = host.data_ptr()
    del host
    assert accelerator.pinned() == (now, now + 8192)
    # Copies into it are under way: it is given to nobody else yet.
    assert torch.empty(5000, dtype=torch.uint8, pin_memory=True).data_ptr() != address
    accelerator.mod.synchronize()
    own = bytearray(4096)
    there = torch.frombuffer(own, dtype=torch.uint8)
    assert not there.is_pinned()
    accelerator.register_host(there.data_ptr(), 4096)
    assert there.is_pinned()
    accelerator.unregister_host(there.data_ptr())
    assert not there.is_pinned()


def test_copies_of_unpinned_memory_wait(device: torch.device) -> None:
    x, before = torch.ones(4, device=device), accelerator.counts()[2]
    torch.empty(4).copy_(x, non_blocking=True)
    assert accelerator.counts()[2] == before + 1
    torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
    assert accelerator.counts()[2] == before + 1
    x[0].item()
    assert accelerator.counts()[2] == before + 2


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn_like(x),
    "dropout": lambda x: nn.functional.dropout(x + 1, 0.3),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.4)),
    "permutation": lambda x: torch.randperm(100, device=x.device).float(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_those_of_the_state_when_queued(draw: str, device: torch.device) -> None:
    x, own = torch.zeros(100, device=device), accelerator.generator(0)
    on_host = torch.get_rng_state()
    accelerator.delay(2000)
    state = own.get_state()
    one, two = DRAWS[draw](x), DRAWS[draw](x)
    own.set_state(state)  # before the kernels have run
    again = DRAWS[draw](x)
    assert torch.equal(one.cpu(), again.cpu())
    assert not torch.equal(one.cpu(), two.cpu())
    assert torch.equal(on_host, torch.get_rng_state())


@pytest.mark.parametrize("number", [0, 1])
def test_backward_runs_on_the_devices_thread_and_the_forwards_stream(
    number: int, device: torch.device
) -> None:
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            stream = torch.accelerator.current_stream().stream_id
            where = torch.accelerator.current_device_index()
            seen.append((threading.get_ident(), where, stream))
            return gradient * 2

    x = torch.ones(3, device=f"fake:{number}", requires_grad=True)
    side = accelerator.mod.Stream(number)
    accelerator.delay(500)
    with accelerator.mod.stream(side):
        side.wait_stream(accelerator.mod.default_stream(number))
        y = Double.apply(x).sum()
    accelerator.mod.default_stream(number).wait_stream(side)
    y.backward()
    assert x.grad is not None
    assert x.grad.cpu().tolist() == [2, 2, 2]
    thread, where, stream = seen[0]
    assert (where, stream) == (number, side.stream_id)
    assert thread != threading.get_ident()


def test_a_copy_between_devices_is_ordered_with_both(device: torch.device) -> None:
    accelerator.delay(1000)
    for value in range(10):
        x = torch.full((100,), float(value), device=device)
        y = x.to("fake:1")
        x.fill_(-1)
        assert y.cpu().tolist() == [value] * 100


def test_a_kernels_error_comes_late(device: torch.device) -> None:
    table = torch.zeros(4, 2, device=device)
    accelerator.delay(1000)
    nn.functional.embedding(torch.full((3,), 9, device=device), table)
    with pytest.raises(IndexError):
        accelerator.mod.synchronize()
    accelerator.mod.synchronize()


def test_time_between_events(device: torch.device) -> None:
    begin, end = (accelerator.mod.Event(enable_timing=True) for _ in range(2))
    begin.record()
    time.sleep(0.02)
    end.record()
    with pytest.raises(ValueError, match="enable_timing"):
        accelerator.mod.Event().elapsed_time(end)
    end.synchronize()
    assert 15 < begin.elapsed_time(end) < 5000


def test_views_share_memory_and_host_tensors_are_refused(device: torch.device) -> None:
    x = torch.arange(12.0, device=device)
    windows = x.unfold(0, 4, 2)
    windows[1].zero_()
    assert x.cpu().tolist() == [0, 1, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(12)
    assert (x + torch.tensor(1.0)).cpu()[0] == 1
    assert x[torch.tensor([1, 6])].cpu().tolist() == [1, 6]


def test_training(device: torch.device) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    models = [first, *(copy.deepcopy(first).to(device) for _ in range(2))]
    accelerator.delay(200)
    inputs = torch.randn(8, 16)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters())
        x = inputs.to(next(model.parameters()).device)
        target = torch.zeros(8, dtype=torch.long, device=x.device)
        for _ in range(3):
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    on_host, one, two = ([value.detach().cpu() for value in m.parameters()] for m in models)
    assert all(map(torch.equal, one, two))
    torch.testing.assert_close(one, on_host)


def test_convolutions(device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    there = nn.Sequential(*layers, nn.ConvTranspose2d(8, 4, 2, groups=2))
    here = copy.deepcopy(there).to(device)
    x = torch.randn(2, 3, 8, 8)
    there(x).square().sum().backward()
    here(x.to(device)).square().sum().backward()
    for one, two in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad.cpu())  # type: ignore[union-attr]
    accelerator.mod.reset_peak_memory_stats()
    before = accelerator.mod.memory_allocated()
    made = here[0](x.to(device))
    assert accelerator.mod.max_memory_allocated() - before > 2 * made.nbytes  # and scratch memory


@pytest.mark.parametrize("test", ["one", "the next"])
def test_memory_that_a_test_frees_is_not_reserved_in_the_next(
    test: str, device: torch.device
) -> None:
    assert accelerator.mod.memory_reserved(0) - accelerator.mod.memory_allocated(0) < 2**20
    torch.empty(2**24, dtype=torch.uint8, device=device)

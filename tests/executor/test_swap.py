"""Swapping on CPU: a tensor that leaves the device and comes back is the same, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from random import Random
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.executor import swap
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap import HostAccount, ThreadSwap
from memopt.programs.instructions import Compute, Free, SwapIn, SwapOut
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from tests.executor.harness import Case, Prepared, assert_same, prepare, run_steps, swap_all
from tests.random_programs import random_program

LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "slice": lambda: torch.randn(8, 5)[2:6:2],
    "bfloat16": lambda: torch.randn(7).to(torch.bfloat16),
    "bool": lambda: torch.randn(7) > 0,
    "complex": lambda: torch.randn(7, dtype=torch.complex64),
    "channels-last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3.5),
    "conjugated": lambda: torch.randn(7, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(7, dtype=torch.complex64).conj().imag,
    "empty": lambda: torch.empty(0, 4),
    "nan": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout: str) -> None:
    tensor, swap = LAYOUTS[layout](), ThreadSwap()
    copy = swap.out(tensor)
    swap.wait(copy)
    back = swap.bring(copy)
    swap.wait(copy)
    assert (
        back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        or not tensor.numel()
    )
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert back.storage_offset() == tensor.storage_offset()
    torch.testing.assert_close(back, tensor, rtol=0, atol=0, equal_nan=True)
    whole = [bytes(t.untyped_storage()) for t in (tensor, back)]
    assert whole[0] == whole[1]


def test_copies_on_their_way_out_are_brought_back_in_order() -> None:
    swap = ThreadSwap()
    tensors = [torch.randn(1000) for _ in range(20)]
    copies = [swap.out(t) for t in tensors]
    back = [swap.bring(c) for c in copies]
    for copy in copies:
        swap.wait(copy)
    assert all(map(torch.equal, tensors, back))


def test_host_bytes_are_counted() -> None:
    swap = ThreadSwap()
    copies = [swap.out(torch.zeros(256)) for _ in range(3)]
    for copy in copies:
        swap.wait(copy)
    assert (swap.account.now_bytes, swap.account.peak_bytes) == (3072, 3072)
    del copy, copies
    gc.collect()
    assert (swap.account.now_bytes, swap.account.peak_bytes) == (0, 3072)


class Block(nn.Module):
    """Everything at once: dropout, batch norm, views, a residual, an updated buffer."""

    def __init__(self, *, random: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.b = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.random = random
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.a(x).chunk(2, -1)
        y = self.norm(value) * gate.sigmoid()
        if self.random:
            y = functional.dropout(y, 0.3) + 0.1 * torch.randn_like(y)
        z = self.b(y * (self.mean + 1).exp()) + x
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return z, y.t()


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 6),)


def prepared_block(random: bool) -> Prepared:
    torch.manual_seed(0)
    return prepare(Block(random=random), torch.randn(4, 6))


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
def test_host_memory_of_a_step_is_the_replayed_one(interpreted: bool) -> None:
    prepared = prepared_block(random=True)
    program = swap_all(prepared.graph)
    assert sum(isinstance(i, SwapOut) for i in program) > 3
    assert sum(isinstance(i, SwapIn) for i in program) > 3
    swap = ThreadSwap()
    installed = install(
        prepared.captured, prepared.lowering, program, interpreted=interpreted, swap=swap
    )
    runtime = runtime_of(prepared.captured)
    planned = PlannedModule(prepared.model, prepared.captured, runtime, installed)
    planned(torch.randn(4, 6))[0].sum().backward()
    gc.collect()
    assert swap.account.peak_bytes == replay(prepared.graph, program).host_peak_bytes
    assert swap.account.now_bytes == 0


def test_what_shares_storage_moves_once_and_stays_for_its_readers() -> None:
    """`value` and `gate` are views of one product: one copy out while both still read the device's,
    one back."""
    prepared = prepared_block(random=False)
    graph, program = prepared.graph, swap_all(prepared.graph)
    (shared,) = (t for t in graph.operators[0].writes if graph.tensors[t].size_bytes == 4 * 4 * 12)
    left = [i for i, one in enumerate(program) if one == SwapOut(shared)]
    assert len(left) == sum(one == SwapIn(shared) for one in program) == 1
    freed = next(i for i, one in enumerate(program) if one == Free(shared))
    readers = [
        i
        for i, one in enumerate(program.instructions[:freed])
        if isinstance(one, Compute) and shared in graph.operators[one.op].reads
    ]
    assert len(readers) == 2
    assert left[0] < min(readers)
    case = Case(lambda: prepared.model, rows)
    state = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    torch.manual_seed(1)
    expected = run_steps(case, prepared.model, prepared.model)
    prepared.model.load_state_dict(state)
    torch.manual_seed(1)
    assert_same(run_steps(case, prepared.planned(program), prepared.model), expected, "swapped")


@pytest.mark.parametrize("random", [False, True], ids=["deterministic", "random"])
def test_random_programs(random: bool) -> None:
    """Any valid program, however it recomputes, swaps and (nothing random) reorders, is exact."""
    prepared = prepared_block(random)
    case = Case(lambda: prepared.model, rows)
    start = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    torch.manual_seed(1)
    expected = run_steps(case, prepared.model, prepared.model)
    for seed in range(40):
        rng = Random(seed)
        program = random_program(
            rng,
            prepared.graph,
            recomputations=rng.randint(0, 12),
            swaps=rng.randint(0, 8),
            reorder=not random,
        )
        assert validate(prepared.graph, program) is None
        prepared.model.load_state_dict(start)
        torch.manual_seed(1)
        planned = prepared.planned(program, interpreted=bool(seed % 2))
        assert_same(run_steps(case, planned, prepared.model), expected, f"seed {seed}")
    assert prepared.waiting == 0


def test_counting_copies_takes_no_longer_with_more_of_them() -> None:
    """Before, each copy that was added summed up all that were alive. Counted in bytecode, not in
    seconds; a copy that dies in any order leaves the sums exact."""

    class Copy:
        pass

    def work(alive: int) -> int:
        account, lines = HostAccount(), 0
        copies = [Copy() for _ in range(alive)]
        for copy in copies:
            account.add(copy, 3)

        def count(*_: object) -> object:
            nonlocal lines
            lines += 1
            return count

        sys.settrace(count)
        try:
            account.add(copies[0], 5)
        finally:
            sys.settrace(None)
        assert (account.now_bytes, account.peak_bytes) == (3 * alive + 5,) * 2
        del copies[1:], copy
        another = Copy()
        account.add(another, 1)
        assert (account.now_bytes, account.peak_bytes) == (9, 3 * alive + 5)
        return lines

    assert work(2) == work(500)


@pytest.mark.parametrize("line", range(30))
def test_copies_are_counted_after_an_interruption_in_another_thread(
    line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption where the lock is taken or given back leaves it taken, for all other threads;
    the next of them waited for ever."""

    class Copy:
        pass

    monkeypatch.setattr(swap, "LEFT_TAKEN_S", 0.05, raising=False)
    account, copies, left = HostAccount(), [Copy() for _ in range(3)], line

    def interrupt(frame: FrameType, *_: object) -> object:
        nonlocal left
        if frame.f_globals is not vars(swap):
            return None
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    def interrupted() -> None:
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            account.add(copies[0], 5)
        sys.settrace(None)

    account.add(copies[1], 3)
    thread = threading.Thread(target=interrupted)
    thread.start()
    thread.join()
    account.add(copies[2], 1)
    assert account.peak_bytes == account.now_bytes
    assert account.now_bytes in (4, 9)

"""The order of copies on streams: by a stand-in whose copies happen as late as the events allow,
so that a missing wait shows as wrong bits; and the same on a GPU where there is one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from random import Random

import pytest
import torch

from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.swap_streams import DeviceStreams, PooledCopy, PoolLease, StreamSwap
from memopt.executor.values import place_host_copies
from memopt.programs.instructions import DropHost, LossBoundary, Program, SwapOut
from memopt.programs.replay import replay
from tests.executor.harness import Case, Prepared, assert_same, run_steps, swap_all
from tests.executor.test_swap import prepared_block, rows
from tests.random_programs import random_program

Event = tuple[str, int]


class LateStreams:
    """Copies are queued and run only when an event of them is waited for. A copy whose device
    memory is gone by then fails: it was freed before the copy's end."""

    def __init__(self) -> None:
        self.queues: dict[str, list[tuple[torch.Tensor, torch.Tensor, list[Event]]]] = {
            "out": [],
            "in": [],
        }
        self.done = {"out": 0, "in": 0}
        self.dead: list[str] = []
        self.copies = 0

    def here(self) -> str:
        return "compute"

    def mark(self, home: str) -> Event:
        assert home == "compute"
        return ("compute", 0)  # the compute stream runs at once: its events are over

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, outward: bool, after: Sequence[Event]
    ) -> Event:
        name = "out" if outward else "in"
        # What the copy's owner holds may die; the queue must not keep it alive by itself.
        device = source if outward else target
        host = target if outward else source
        self.queues[name].append((weakref.ref(device), host, list(after)))  # type: ignore[arg-type]  # the device side is weak
        self.copies += 1
        return (name, len(self.queues[name]))

    def wait(self, event: Event, home: str = "compute") -> None:
        name, position = event
        if name == "compute":
            return
        while self.done[name] < position:
            weak, host, after = self.queues[name][self.done[name]]
            self.done[name] += 1
            for other in after:
                self.wait(other)
            device = weak()  # type: ignore[operator]  # a weak reference
            if device is None:
                self.dead.append(f"{name} {self.done[name]}")
            elif name == "out":
                host.copy_(device)
            else:
                device.copy_(host)

    def finish(self, event: Event) -> None:
        self.wait(event)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)


def planned_with(
    prepared: Prepared, program: object, streams: LateStreams, interpreted: bool = False
) -> tuple[PlannedModule, StreamSwap]:
    placement = place_host_copies(prepared.graph, program)  # type: ignore[arg-type]  # a Program
    swap = StreamSwap(streams, placement.extent_bytes)
    installed = install(
        prepared.captured,
        prepared.lowering,
        program,  # type: ignore[arg-type]  # a Program
        interpreted=interpreted,
        swap=swap,
    )
    runtime = runtime_of(prepared.captured)
    return PlannedModule(prepared.model, prepared.captured, runtime, installed), swap


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
def test_no_read_before_its_event_and_no_free_before_the_copy(interpreted: bool) -> None:
    prepared = prepared_block(random=True)
    case = Case(lambda: prepared.model, rows)
    start = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    torch.manual_seed(1)
    expected = run_steps(case, prepared.model, prepared.model)
    moved = 0
    for seed in range(20):
        program = random_program(Random(seed), prepared.graph, recomputations=4, swaps=8)
        prepared.model.load_state_dict(start)
        streams = LateStreams()
        planned, swap = planned_with(prepared, program, streams, interpreted)
        torch.manual_seed(1)
        assert_same(run_steps(case, planned, prepared.model), expected, f"seed {seed}")
        gc.collect()
        assert streams.dead == []
        assert swap.account.now_bytes == 0
        moved += streams.copies
    assert moved > 100


def test_one_pool_for_all_steps_and_two_for_two_at_once() -> None:
    prepared = prepared_block(random=False)
    program = swap_all(prepared.graph)
    streams = LateStreams()
    planned, swap = planned_with(prepared, program, streams)
    for _ in range(3):
        planned(*rows())[0].sum().backward()
        gc.collect()
        assert len(swap._free) == 1
    assert swap.account.peak_bytes == replay(prepared.graph, program).host_peak_bytes
    first, second = planned(*rows())[0].sum(), planned(*rows())[0].sum()
    first.backward()
    second.backward()
    del first, second
    gc.collect()
    assert len(swap._free) == 2


def test_a_skipped_backward_gives_everything_back() -> None:
    prepared = prepared_block(random=False)
    streams = LateStreams()
    planned, swap = planned_with(prepared, swap_all(prepared.graph), streams)
    outputs = planned(*rows())
    assert swap.account.now_bytes > 0
    del outputs
    gc.collect()
    assert swap.account.now_bytes == 0
    assert len(swap._free) == 1
    assert streams.dead == []


def test_host_copies_never_overlap_in_a_pool_of_the_most_bytes_at_once() -> None:
    """Before, what crossed the loss boundary kept its place to the end, for a second backward: the
    pool was up to 14% larger than the plan's host peak."""
    prepared = prepared_block(random=False)
    sizes = [-(-one.size_bytes // 512) * 512 for one in prepared.graph.tensors]
    for seed in range(30):
        program = random_program(Random(seed), prepared.graph, swaps=8, recomputations=4)
        placement = place_host_copies(prepared.graph, program)
        live: dict[int, tuple[int, int]] = {}
        most = 0
        for instruction in program:
            if isinstance(instruction, SwapOut):
                low = placement.offsets[instruction.tensor]
                high = low + sizes[instruction.tensor]
                assert all(high <= a or b <= low for a, b in live.values())
                live[instruction.tensor] = (low, high)
                most = max(most, sum(b - a for a, b in live.values()))
            elif isinstance(instruction, DropHost):
                del live[instruction.tensor]
        assert placement.extent_bytes == most, seed


@pytest.mark.parametrize("interpreted", [False, True], ids=["generated", "interpreted"])
def test_a_retained_graph_has_a_pool_for_each_backward(interpreted: bool) -> None:
    prepared = prepared_block(random=False)
    start = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    written = 0
    for seed in range(4):
        program = random_program(Random(seed), prepared.graph, swaps=8, recomputations=4)
        written += placed_over(prepared, program)
        streams = LateStreams()
        planned, swap = planned_with(prepared, program, streams, interpreted)
        torch.manual_seed(seed)
        given = rows()
        runs: list[list[torch.Tensor]] = []
        for module in (prepared.model, planned):
            prepared.model.load_state_dict(start)
            output = module(*given)
            loss = (output if isinstance(output, torch.Tensor) else output[0]).square().sum()
            for again in (True, True, False):
                prepared.model.zero_grad()
                loss.backward(retain_graph=again)
                every = [p.grad for p in prepared.model.parameters()]
                runs.append([grad.clone() for grad in every if grad is not None])
            del output, loss
        for found, wanted in zip(runs[3:], runs[:3], strict=True):
            assert all(map(torch.equal, found, wanted)), seed
        gc.collect()
        assert streams.dead == []
        assert swap.account.now_bytes == 0
    assert written > 0


def placed_over(prepared: Prepared, program: Program) -> int:
    """Count the copies that the backward writes over what crossed the loss boundary."""
    offsets = place_host_copies(prepared.graph, program).offsets
    ends = {t: offsets[t] + prepared.graph.tensors[t].size_bytes for t in offsets}
    live: set[int] = set()
    crossed: set[int] = set()
    found = 0
    for instruction in program:
        if isinstance(instruction, SwapOut):
            live.add(instruction.tensor)
            low, high = offsets[instruction.tensor], ends[instruction.tensor]
            found += any(low < ends[t] and offsets[t] < high for t in crossed)
        elif isinstance(instruction, DropHost):
            live.discard(instruction.tensor)
        elif isinstance(instruction, LossBoundary):
            crossed = set(live)
    return found


class TwoStreams(LateStreams):
    """With a compute stream for each thread, and notes of who was told to wait or marked."""

    def __init__(self) -> None:
        super().__init__()
        self.current = "first"
        self.marked: list[str] = []
        self.waited: list[tuple[str, str]] = []

    def here(self) -> str:
        return self.current

    def mark(self, home: str) -> Event:
        self.marked.append(home)
        return ("compute", len(self.marked))

    def wait(self, event: Event, home: str = "compute") -> None:
        if home != "compute":  # else an event that a copy waits for
            self.waited.append((self.current, home))
        super().wait(event)


def test_a_step_dropped_under_another_stream() -> None:
    """Its own stream waits for what is under way, and says when the pool is idle."""
    streams = TwoStreams()
    swap = StreamSwap(streams, 512)
    copy = swap.out(torch.ones(64), 0, swap.lease())
    streams.current = "second"  # the garbage collector's thread, say
    del copy
    gc.collect()
    assert streams.waited == [("second", "first")]
    assert streams.dead == []
    assert streams.marked == ["first", "first"]
    ((_, idle),) = swap._free
    lease = swap.lease()
    assert streams.waited[1:] == [("second", "second")]
    assert idle == ("compute", 2)
    assert lease.home == "second"


@pytest.mark.parametrize("kind", [PoolLease, PooledCopy])
def test_what_an_interrupted_constructor_leaves_ends_quietly(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    kind.__new__(kind)
    gc.collect()
    assert said == []


def check_on(device: torch.device) -> None:
    """What went to the host comes back."""
    swap = StreamSwap(DeviceStreams(device), 1 << 24)
    lease = swap.lease()
    tensors = [torch.randn(1 << 18, device=device) for _ in range(8)]
    expected = [t.clone() for t in tensors]
    copies = [swap.out(t, i << 20, lease) for i, t in enumerate(tensors)]
    for copy in copies:
        swap.wait(copy)
    tensors.clear()
    back = [swap.bring(copy) for copy in copies]
    for copy in copies:
        swap.wait(copy)
    assert all(map(torch.equal, back, expected))


@pytest.mark.gpu(twin="test_one_pool_for_all_steps_and_two_for_two_at_once")
def test_on_a_gpu() -> None:
    check_on(torch.device("cuda"))

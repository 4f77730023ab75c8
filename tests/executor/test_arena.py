"""Plans with addresses run at them: bit for bit, in the memory they promise."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import ArenaError, InvalidProgramError
from memopt.executor.apply import runtime_of
from memopt.executor.arena import Arenas, Lease, arena_layout
from memopt.executor.arena_check import CheckedArenas, CheckedLease
from memopt.executor.module import PlannedModule, install
from memopt.models.program import Program
from memopt.models.replay import replay
from memopt.models.validate import ViolationCode, validate
from memopt.plan import Plan
from memopt.profiler.memory import metered
from memopt.strategies.olla.passes import place_program
from tests.executor.harness import PROGRAMS, prepare

CPU = torch.device("cpu")


class Net(nn.Module):
    """Convolutions, norms, attention and dropout: kernels of every kind of form, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.3)
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.mix(tokens).split(8, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) * 0.3, -1)
        tokens = tokens + self.drop(weights @ v)
        tokens = self.last(torch.cat([tokens[:, :2], tokens[:, 2:] * 2], 1))
        return self.head(tokens.mean(1)), tokens[:, 0]


Case = tuple[Net, torch.optim.Optimizer, Plan]


def build() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))


def loss_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0], target) + output[1].square().mean()


@functools.cache
def step_plan(strategy: str = "olla", budget: int | None = None) -> Case:
    """One planned step for each kind of plan; tests train its model on."""
    model, x, y = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = memopt.plan(
        model, x, loss_fn=loss_of, targets=(y,), optimizer=optimizer, strategy=strategy,
        budget=budget, place=True, cache=False, progress=False,
    )  # fmt: skip
    return model, optimizer, plan


@functools.cache
def module_plan() -> tuple[Net, Plan]:
    model, x, _ = build()
    return model, memopt.plan(model, x, strategy="olla", cache=False, progress=False)


def with_offsets(plan: Plan, change: Callable[[int, int, int], int]) -> Plan:
    assert plan.program is not None
    assert plan.program.offsets is not None
    moved = [(i, t, change(i, t, o)) for i, t, o in plan.program.offsets]
    made = Program(plan.program.instructions, moved, plan.program.apart)
    return replace(plan, program=made)


def eager_step(model: Net, x: Tensor, y: Tensor, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """Outputs and gradients of one unplanned step."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(x)
    loss_of(output, y).backward()  # type: ignore[no-untyped-call]
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, (list, tuple)):
        return all(same(a, b) for a, b in zip(found, expected, strict=True))
    return bool(torch.equal(found, expected))


@pytest.mark.parametrize("checked", [False, True])
def test_train_steps_equal_eager_in_the_planned_memory(checked: bool) -> None:
    model, optimizer, plan = step_plan()
    twin = copy.deepcopy(model)
    expected = torch.optim.AdamW(twin.parameters(), lr=0.01)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = plan.train_step(model, loss_of, optimizer, checked=checked)
    assert ("arena.read(" in step.code) == checked
    _, x, y = build()
    for number in range(3):
        torch.manual_seed(number)
        with metered(CPU) as use:
            loss = step(x, targets=(y,))
        eager_step(twin, x, y, number)
        expected.step()
    assert same(model.state_dict(), twin.state_dict())
    assert loss.untyped_storage().nbytes() == 4
    planned = plan.peak_bytes - plan.resident_bytes
    assert 0.98 * planned <= use.peak_bytes <= 1.005 * planned
    assert use.end_bytes <= 64


@pytest.mark.parametrize("checked", [False, True])
def test_lifetimes_left_to_the_allocator_lie_outside(checked: bool) -> None:
    model, optimizer, plan = step_plan()
    assert plan.graph is not None
    assert plan.program is not None
    program = plan.program
    for position, tensor, offset in (plan.program.offsets or ())[::3]:
        fewer = [x for x in program.offsets or () if x != (position, tensor, offset)]
        made = Program(program.instructions, fewer, [*program.apart, (position, tensor)])
        # What is computed in place stays with what it overwrites.
        if validate(plan.graph, made) is None:
            program = made
    assert len(program.apart) > 5
    twin = copy.deepcopy(model)
    expected = torch.optim.AdamW(twin.parameters(), lr=0.01)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = replace(plan, program=program).train_step(model, loss_of, optimizer, checked=checked)
    _, x, y = build()
    for number in range(2):
        torch.manual_seed(number)
        with metered(CPU) as use:
            step(x, targets=(y,))
        eager_step(twin, x, y, number)
        expected.step()
    assert same(model.state_dict(), twin.state_dict())
    planned = replay(plan.graph, program).placed_peak_bytes
    assert planned is not None
    assert 0.98 <= use.peak_bytes / (planned - plan.resident_bytes) <= 1.005


@pytest.mark.parametrize("name", ["swap_all", "recompute_all"])
def test_swapped_and_recomputed_tensors_have_addresses(name: str) -> None:
    model, x, y = build()
    twin = copy.deepcopy(model)
    prepared = prepare(model, x)
    program, _ = place_program(prepared.graph, PROGRAMS[name](prepared.graph))
    assert program.offsets is not None
    assert len(program.offsets) > len({tensor for _, tensor, _ in program.offsets})
    assert validate(prepared.graph, program) is None
    for checked in (False, True):
        installed = install(prepared.captured, prepared.lowering, program, checked=checked)
        assert ("swap.bring(" in installed.source) == (name == "swap_all")
        runtime = runtime_of(prepared.captured)
        planned = PlannedModule(model, prepared.captured, runtime, installed)
        expected = eager_step(twin, x, y, 3)
        model.zero_grad()
        torch.manual_seed(3)
        output = planned(x)
        loss_of(output, y).backward()  # type: ignore[no-untyped-call]
        assert same((output, gradients(model)), expected)


def test_a_module_in_place_of_the_users() -> None:
    model, plan = module_plan()
    twin = copy.deepcopy(model)
    planned = plan.apply(model, checked=True)
    assert "arenas.lease()" in plan.code
    kept = []
    x, y = build()[1:]
    for number in range(3):
        expected = eager_step(twin, x, y, number)
        torch.manual_seed(number)
        model.zero_grad()
        output = planned(x)
        loss_of(output, y).backward()  # type: ignore[no-untyped-call]
        kept.append(((output, gradients(model)), expected))
        assert same(model.state_dict(), twin.state_dict())
    # What the user holds is not in memory that later steps have written to.
    assert all(same(found, wanted) for found, wanted in kept)


def test_two_steps_under_way_have_two_arenas() -> None:
    model, plan = module_plan()
    twin = copy.deepcopy(model)
    planned = plan.apply(model, checked=True)
    x, y = build()[1:]
    for order in ((0, 1), (1, 0)):
        grads = []
        for one in (planned, twin):
            one.zero_grad()
            torch.manual_seed(5)
            losses = [loss_of(one(x * scale), y) for scale in (1.0, 2.0)]
            for index in order:
                losses[index].backward()  # type: ignore[no-untyped-call]
            grads.append(gradients(one))
        assert same(*grads)
    assert same(model.state_dict(), twin.state_dict())


def test_backward_twice_with_retain_graph() -> None:
    model, plan = module_plan()
    twin = copy.deepcopy(model)
    planned = plan.apply(model, checked=True)
    x, y = build()[1:]
    grads = []
    for one in (planned, twin):
        one.zero_grad()
        torch.manual_seed(5)
        loss = loss_of(one(x), y)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        grads.append(gradients(one))
    assert same(*grads)


class _Watched(Arenas):
    """Arenas that remember their leases weakly."""

    seen: list[weakref.ref[Lease]]

    def lease(self) -> Lease:
        lease = super().lease()
        self.seen.append(weakref.ref(lease))
        return lease


def test_errors_and_steps_without_backward_release_the_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Watched.seen = []
    monkeypatch.setattr("memopt.executor.module.Arenas", _Watched)
    model, plan = module_plan()
    planned = plan.apply(model)
    x, y = build()[1:]
    output = planned(x)
    assert _Watched.seen[-1]() is not None
    del output
    gc.collect()
    assert _Watched.seen[-1]() is None
    output = planned(x)
    hook = output[0].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(output, y).backward()  # type: ignore[no-untyped-call]
    hook.remove()
    del output
    gc.collect()
    assert _Watched.seen[-1]() is None
    real = torch.nn.functional.cross_entropy
    loss = real(planned(x)[0], y)
    loss.backward()  # type: ignore[no-untyped-call]
    gc.collect()
    assert _Watched.seen[-1]() is None
    assert len(_Watched.seen) == 3


def test_the_last_program_that_ran_keeps_one_arena_for_its_next_step() -> None:
    plan = module_plan()[1]
    assert plan.program is not None
    assert plan.profiled is not None
    layout = arena_layout(plan.profiled.lowering, plan.program, CPU)
    assert layout is not None
    first, other = Arenas(layout), Arenas(layout)
    one, two = first.lease(), first.lease()
    addresses = {one.memory.data_ptr(), two.memory.data_ptr()}
    assert len(addresses) == 2
    memory = weakref.ref(one.memory)
    del one
    del two
    assert memory() is None
    again = first.lease()
    assert again.memory.data_ptr() in addresses
    memory = weakref.ref(again.memory)
    del again
    assert memory() is not None
    # A profiler sees every step's arena.
    with metered(CPU) as use:
        del_me = first.lease()
        assert memory() is None
        del del_me
    assert (use.peak_bytes, use.end_bytes) == (layout.extent_bytes, 0)
    memory = weakref.ref(first.lease().memory)
    assert memory() is not None
    other.lease()
    assert memory() is None
    memory = weakref.ref(other.lease().memory)
    del other
    gc.collect()
    assert memory() is None


def test_a_failing_update_releases_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    _Watched.seen = []
    monkeypatch.setattr("memopt.executor.module.Arenas", _Watched)
    model, optimizer, plan = step_plan()
    step = plan.train_step(model, loss_of, optimizer)
    _, x, y = build()

    def failing() -> None:
        raise RuntimeError("no memory")

    real = optimizer.step
    optimizer.step = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="no memory"):
        step(x, targets=(y,))
    optimizer.step = real  # type: ignore[method-assign]
    gc.collect()
    assert _Watched.seen[-1]() is None
    step(x, targets=(y,))


def test_a_wrong_placement_is_found_at_the_first_spoilt_read() -> None:
    model, optimizer, plan = step_plan()
    _, x, y = build()
    everything_at_0 = with_offsets(plan, lambda *_: 0)
    assert plan.graph is not None
    assert everything_at_0.program is not None
    violation = validate(plan.graph, everything_at_0.program)
    assert violation is not None
    assert violation.code is ViolationCode.ADDRESSES_OVERLAP
    step = everything_at_0.train_step(model, loss_of, optimizer, checked=True)
    with pytest.raises(ArenaError, match=r"reads .* overwritten by"):
        step(x, targets=(y,))


def test_one_tensor_at_anothers_addresses_is_found() -> None:
    """Tensors moved one by one onto a neighbour that is live together with them."""
    model, optimizer, plan = step_plan()
    _, x, y = build()
    assert plan.program is not None
    assert plan.graph is not None
    assert plan.program.offsets is not None
    outcomes = []
    for index in range(3, len(plan.program.offsets), 13):
        at, tensor, _ = plan.program.offsets[index]
        other = plan.program.offsets[index - 1][2]
        wrong = with_offsets(
            plan, lambda i, t, o, a=at, b=tensor, c=other: c if (i, t) == (a, b) else o
        )
        assert wrong.program is not None
        if validate(plan.graph, wrong.program) is None:
            continue
        step = wrong.train_step(model, loss_of, optimizer, checked=True)
        try:
            step(x, targets=(y,))
        except memopt.MemoptError as error:
            outcomes.append("overwritten" in str(error))
    assert len(outcomes) >= 2
    assert all(outcomes)


def test_reads_of_freed_and_of_foreign_memory_are_found() -> None:
    plan = step_plan()[2]
    assert plan.profiled is not None
    assert plan.program is not None
    layout = arena_layout(plan.profiled.lowering, plan.program, CPU)
    assert layout is not None
    lease = CheckedArenas(layout).lease()
    assert isinstance(lease, CheckedLease)
    lease.slots[0].zero_()
    lease.wrote([0], "relu")
    lease.read([0], "mul")
    lease.memory[layout.slots[0].offset_bytes] = 7
    with pytest.raises(ArenaError, match=r"mul reads .* a kernel that wrote beyond its own"):
        lease.read([0], "mul")
    lease.freed([0])
    assert bool((lease.bytes_of(0) == 255).all())
    with pytest.raises(ArenaError, match=re.escape(f"mul reads {layout.name(0)}, whose")):
        lease.read([0], "mul")


def test_addresses_that_kernels_cannot_use_are_refused() -> None:
    model, optimizer, plan = step_plan()
    crooked = with_offsets(plan, lambda _i, _t, offset: offset + 4)
    with pytest.raises(InvalidProgramError, match="alignment=64"):
        crooked.train_step(model, loss_of, optimizer)


def test_what_lies_outside_is_named_and_charged() -> None:
    _, _, plan = step_plan()
    use = plan.arena
    assert use is not None
    assert plan.graph is not None
    assert plan.program is not None
    assert {kernel.target for kernel in use.outside} >= {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
    assert 0.4 < use.coverage < 1
    timeline = replay(plan.graph, plan.program)
    assert use.arena_bytes == timeline.arena_bytes
    assert use.arena_bytes + use.extra_bytes == plan.peak_bytes
    assert plan.program.offsets is not None
    placed = {tensor for _, tensor, _ in plan.program.offsets}
    assert not placed & set(plan.graph.outside)
    first = plan.graph.outside[0]
    begin = next(i for i, x in enumerate(plan.program) if first in getattr(x, "outputs", ()))
    stray = Program(plan.program.instructions, [*plan.program.offsets, (begin, first, 0)])
    violation = validate(plan.graph, stray)
    assert violation is not None
    assert violation.code is ViolationCode.OFFSET_STRAY
    kept = next(x for x in plan.program.offsets if x[1] in plan.program.instructions[x[0]].outputs)  # type: ignore[union-attr]  # all are Compute
    fewer = Program(plan.program.instructions, [x for x in plan.program.offsets if x != kept])
    violation = validate(plan.graph, fewer)
    assert violation is not None
    assert violation.code is ViolationCode.OFFSET_MISSING


def test_a_plan_without_addresses_has_no_arena() -> None:
    model, x, _ = build()
    plan = memopt.plan(model, x, strategy="store-all", cache=False, progress=False)
    assert plan.arena is None
    assert "arena" not in plan.code


def test_a_loaded_plan_runs_in_its_arena(tmp_path: Path) -> None:
    model, plan = module_plan()
    plan.save(tmp_path / "plan")
    loaded = memopt.load(tmp_path / "plan")
    assert loaded.graph is not None
    assert plan.graph is not None
    assert loaded.graph.outside == plan.graph.outside
    assert loaded.arena == plan.arena
    twin = copy.deepcopy(model)
    x, y = build()[1:]
    planned = loaded.apply(model, x)
    assert "arenas.lease()" in planned.code  # type: ignore[operator]  # a str
    expected = eager_step(twin, x, y, 3)
    model.zero_grad()
    torch.manual_seed(3)
    output = planned(x)
    loss_of(output, y).backward()  # type: ignore[no-untyped-call]
    assert same((output, gradients(model)), expected)

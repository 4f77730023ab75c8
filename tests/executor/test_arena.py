"""Plans with addresses run at them: bit for bit, in the memory they promise."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memopt
from memopt.executor.apply import runtime_of
from memopt.executor.arena import ArenaLease, Arenas, arena_layout
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.passes.passes import place_program
from memopt.pricing.memory import metered
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from tests.executor.arena_cases import (
    build,
    eager_step,
    gradients,
    loss_of,
    module_plan,
    same,
    step_plan,
)
from tests.executor.harness import PROGRAMS, prepare

CPU = torch.device("cpu")


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
        made = Program(program.instructions, fewer, [*program.unplaced, (position, tensor)])
        # What is computed in place stays with what it overwrites.
        if validate(plan.graph, made) is None:
            program = made
    assert len(program.unplaced) > 5
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

    seen: list[weakref.ref[ArenaLease]]

    def lease(self) -> ArenaLease:
        lease = super().lease()
        self.seen.append(weakref.ref(lease))
        return lease


def test_errors_and_steps_without_backward_release_the_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Watched.seen = []
    monkeypatch.setattr("memopt.executor.install.Arenas", _Watched)
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
    monkeypatch.setattr("memopt.executor.install.Arenas", _Watched)
    model, optimizer, plan = step_plan()
    step = plan.train_step(model, loss_of, optimizer)
    _, x, y = build()

    def failing(_self: torch.optim.Optimizer) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(optimizer), "step", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            step(x, targets=(y,))
    gc.collect()
    assert _Watched.seen[-1]() is None
    step(x, targets=(y,))


def test_a_loaded_plan_runs_in_its_arena(tmp_path: Path) -> None:
    model, plan = module_plan()
    plan.save(tmp_path / "plan")
    loaded = memopt.load(tmp_path / "plan")
    assert loaded.graph is not None
    assert plan.graph is not None
    assert loaded.graph.allocator_owned == plan.graph.allocator_owned
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

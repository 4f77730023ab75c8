"""A wrapped model that is called with several shapes: one plan of each, one arena, one budget."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.api import wrap as wrap_module
from memopt.errors import GuardError, InfeasibleBudgetError
from memopt.executor.arena import _KNOWN_ADDRESSES, ArenaFamily, ArenaLease, Arenas
from memopt.pricing.memory import metered

CPU = torch.device("cpu")
WIDTH = 48


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What was planned, in order."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    made: list[Any] = []
    make = wrap_module.make_plan

    def counted(model: Any, inputs: Any, wanted: Any) -> Any:
        made.append(inputs)
        return make(model, inputs, wanted)

    monkeypatch.setattr(wrap_module, "make_plan", counted)
    return made


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def tight(rows: int, place: bool) -> int:
    """The bytes that the largest shape's plan of little memory needs."""
    plan = memopt.plan(
        network(),
        torch.randn(rows, WIDTH),
        budget="min",
        strategy="rotor",
        loss_fn=square,
        place=place,
        progress=False,
    )
    return plan.peak_bytes


def living() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their storages. Views of an arena's addresses,
    which are kept for a few addresses, are dropped first."""
    gc.collect()
    for arenas in [one for one in gc.get_objects() if type(one) is Arenas]:
        assert len(arenas._known) <= _KNOWN_ADDRESSES
        arenas._known.clear()
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return len(found), sum(storages.values())


def check_steps(solved: list[Any], steps: int, place: bool) -> None:
    """Alternating shapes: nothing grows, each shape is planned once, and no step's peak is above
    the budget."""
    shapes = (128, 96, 64)
    budget = tight(shapes[0], place)
    model: Any = memopt.wrap(
        network(), budget, "rotor", loss_fn=square, place=place, progress=False
    )
    resident = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    ends: dict[int, int] = {}
    before = (0, 0)
    for step in range(steps):
        rows = shapes[step % len(shapes)]
        inputs = torch.randn(rows, WIDTH)
        if len(ends) < len(shapes):
            square(model(inputs)).backward()  # plans
            model.zero_grad()
        with metered(CPU) as use:
            square(model(inputs)).backward()
        assert resident + inputs.untyped_storage().nbytes() + use.peak_bytes <= budget
        assert ends.setdefault(rows, use.end_bytes) == use.end_bytes
        model.zero_grad()
        del inputs
        if step == 2 * len(shapes):
            before = living()
    assert living() == before
    assert len(solved) == len(shapes) == len(model.memopt.plans)
    assert model.calls.planned == steps + len(shapes)
    assert model.calls.original == model.calls.replanned == 0


def test_alternating_shapes(solved: list[Any]) -> None:
    check_steps(solved, 30, place=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [False, True])
def test_a_thousand_alternating_steps(solved: list[Any], place: bool) -> None:
    check_steps(solved, 1000, place)


class _Watched:
    """The memory of every arena that a step was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        real = Arenas.lease

        def lease(arenas: Arenas) -> ArenaLease:
            made = real(arenas)
            self.seen.append(weakref.ref(made.memory))
            return made

        monkeypatch.setattr(Arenas, "lease", lease)


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_family_of_shapes_has_one_arena(
    solved: list[Any], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    shapes = [torch.randn(rows, WIDTH) for rows in (64, 128, 96)]
    budget = 2 * tight(128, place=False)
    model: Any = memopt.wrap(
        network(), budget, loss_fn=square, place=True, shapes=shapes, progress=False
    )
    family = model.memopt.family
    assert all(plan.stats["placed"] for plan in model.memopt.plans)
    assert [len(call.args[0]) for call in solved] == [128, 96, 64]
    watched = _Watched(monkeypatch)
    plain = network()
    for step in range(steps):
        inputs = shapes[step % 3]
        gradients = []
        for one in (model, plain):
            torch.manual_seed(step)
            one.zero_grad()
            square(one(inputs)).backward()
            gradients.append([p.grad for p in one.parameters()])
        assert all(map(torch.equal, *gradients))
    assert len(solved) == 3
    assert len(watched.seen) == steps
    # From the largest on every step had the same bytes, which are there for the next one.
    assert {id(one()) for one in watched.seen[1:]} == {id(family.idle[0])}
    assert family.idle[0].numel() == max(one.arena.arena_bytes for one in model.memopt.plans)
    resident = sum(p.numel() * 4 for p in model.parameters())
    for inputs in shapes:
        model.zero_grad()
        with metered(CPU) as use:
            square(model(inputs)).backward()
        assert resident + inputs.numel() * 4 + use.peak_bytes <= budget


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 1.25])
def test_a_tight_budget_is_kept_with_addresses_too(solved: list[Any], share: float) -> None:
    shapes = [torch.randn(rows, WIDTH) for rows in (128, 96)]
    budget = int(share * tight(128, place=False))
    model: Any = memopt.wrap(
        network(), budget, loss_fn=square, place=True, shapes=shapes, progress=False
    )
    resident = sum(p.numel() * 4 for p in model.parameters())
    for inputs in (*shapes, *shapes):
        model.zero_grad()
        with metered(CPU) as use:
            square(model(inputs)).backward()  # type: ignore[no-untyped-call]
        assert resident + inputs.numel() * 4 + use.peak_bytes <= budget
    assert model.calls.planned == 4


def test_a_family_that_grows_between_a_forward_and_its_backward(solved: list[Any]) -> None:
    model: Any = network()
    plain: Any = network()
    memopt.wrap(model, 2**24, loss_fn=square, place=True, progress=False)
    small, large = torch.randn(16, WIDTH), torch.randn(128, WIDTH)
    gradients = []
    for one in (model, plain):
        torch.manual_seed(3)
        first = square(one(small))
        square(one(large)).backward()
        first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        first.backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_idle_arena_serves_a_step_whose_budget_leaves_it_room() -> None:
    family = ArenaFamily()
    for size, spare, serves in ((100, 0, True), (80, 0, False), (80, 20, True), (80, None, True)):
        family.idle, family.spare_bytes = [torch.empty(100, dtype=torch.uint8)], spare
        assert (family.taken(size) is not None) == serves
        assert not family.idle
    family.idle = [torch.empty(60, dtype=torch.uint8)]
    assert family.taken(80) is None
    assert family.taken(80) is None


def test_a_shape_beyond_the_budget_says_what_to_raise(solved: list[Any]) -> None:
    model: Any = memopt.wrap(
        network(),
        tight(32, place=False),
        loss_fn=square,
        shapes=[torch.randn(32, WIDTH)],
        progress=False,
    )
    with pytest.raises(InfeasibleBudgetError, match=r"float32\[512, 48\]") as beyond:
        model(torch.randn(512, WIDTH))
    least = beyond.value.smallest_budget_bytes
    assert f"give at least budget={least}" in str(beyond.value)
    memopt.unwrap(model)
    memopt.wrap(model, least, loss_fn=square, on_mismatch="error", progress=False)
    square(model(torch.randn(512, WIDTH))).backward()
    model.zero_grad()
    with pytest.raises(GuardError, match=r"float32\[16, 48\].*shapes="):
        model(torch.randn(16, WIDTH))

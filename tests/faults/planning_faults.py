"""Faults while a model is planned, at the first call of a wrapped one, and under torch.compile."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memopt
from memopt.api import wrap
from memopt.errors import InfeasibleBudgetError, InvalidProgramError
from memopt.integrations import torch_compile
from memopt.integrations.torch_compile import memopt_backend
from memopt.models.instances import rotor_toy
from memopt.models.status import Status
from memopt.programs.solution import Solution
from memopt.strategies import STRATEGIES
from memopt.strategies.base import Strategy
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import AtAllocation, AtOperator, Injected, error_of, failing
from tests.faults.states import State
from tests.faults.subjects import LOSS, adam, batch, built
from tests.strategies.monet.graphs import training_graph
from tests.whole_steps.test_train_step import assert_same

_UNTOUCHED = "all as before, gradients too"
_PLANS = itertools.count()
GRAPH = training_graph(Random(3), 20, False)


def plan(model: nn.Module, optimizer: Optimizer | None = None, **more: Any) -> memopt.Plan:
    x, y = batch()
    given = {"loss_fn": LOSS, "targets": (y,), "cache": False, "progress": False, **more}
    if optimizer is not None:
        given |= {"optimizer": optimizer, "whole_step": True, "strategy": "rotor"}
    return memopt.plan(model, x, **given)


def trained_model() -> tuple[nn.Module, Optimizer]:
    """A model in the midst of its training: with gradients and optimizer state."""
    model = built()
    optimizer = adam(model)
    x, y = batch()
    LOSS(model(x), y).backward()
    optimizer.step()
    return model, optimizer


def changes_nothing(attempt: Callable[[nn.Module, Optimizer], object]) -> BaseException | None:
    """Planning that may fail leaves everything as it was; what it raised."""
    model, optimizer = trained_model()
    before = State.of(model, optimizer)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kept = [p.grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    error = error_of(lambda: attempt(model, optimizer))
    found = State.of(model, optimizer)
    assert_same(found.trained, before.trained)
    assert_same(found.moved, before.moved)
    assert all(p.grad is one for p, one in zip(model.parameters(), kept, strict=True))
    assert_same([p.grad for p in model.parameters()], gradients)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    return error


def _everywhere(injection: Callable[..., Any], whole: bool, room: Room) -> int:
    def attempt(point: Any, model: nn.Module, optimizer: Optimizer) -> None:
        with point:
            plan(model, optimizer if whole else None)

    count = injection()
    assert changes_nothing(functools.partial(attempt, count)) is None
    happened = 0
    few = 15 if room.everywhere else 2
    for number in range(1, count.seen + 1, max(1, count.seen // few)):
        point = injection(number)
        happened += changes_nothing(functools.partial(attempt, point)) is not None
    return happened


_WHERE = {False: "a module is planned", True: "a whole step is planned"}
_WHAT: dict[str, Callable[..., Any]] = {
    "an operator fails": AtOperator,
    "the memory runs out at an allocation": AtAllocation,
    "Ctrl-C at an operator": functools.partial(AtOperator, error=KeyboardInterrupt),
}
for (_whole, _where), (_what, _injection) in itertools.product(_WHERE.items(), _WHAT.items()):
    fault(Part.PLANNING, f"{_what}, while {_where}", _UNTOUCHED, slow=True)(
        functools.partial(_everywhere, _injection, _whole)
    )


@fault(Part.PLANNING, "the user's loss fails while a module is planned", _UNTOUCHED, slow=True)
def loss_fails(_room: Room) -> int:
    def broken(*_: Any) -> Tensor:
        raise Injected("the loss")

    error = changes_nothing(lambda model, _: plan(model, loss_fn=broken))
    assert "the loss" in str(error)
    return 1


@fault(Part.PLANNING, "the user's forward fails while it is planned", _UNTOUCHED, slow=True)
def forward_fails(_room: Room) -> int:
    def attempt(model: nn.Module, _: Optimizer) -> None:
        def broken(x: Tensor) -> Tensor:
            raise Injected("the forward")

        real = model.forward
        model.forward = broken  # type: ignore[method-assign]
        try:
            plan(model)
        finally:
            model.forward = real  # type: ignore[method-assign]
            del model.forward

    error = changes_nothing(attempt)
    assert "the forward" in str(error)
    return 1


@fault(
    Part.PLANNING,
    "the caller's report of progress fails",
    f"its own error; {_UNTOUCHED}",
    slow=True,
)
def report_fails(_room: Room) -> int:
    def broken(_fraction: float, _what: str) -> None:
        raise Injected("the report")

    error = error_of(lambda: memopt.plan(GRAPH, budget=0.8, strategy="monet", progress=broken))
    assert isinstance(error, Injected)
    return 1


@fault(Part.PLANNING, "Ctrl-C in a solver, at any report", "a plan within the budget all the same")
def ctrl_c_in_solver(room: Room) -> int:
    names = ("rotor", "rotor-menus", "monet", "checkmate", "auto")
    assert {*names} <= {one.name for one in STRATEGIES}
    happened = 0
    for name in names if room.everywhere else names[:1]:
        for number in range(1, 9):
            report = failing(lambda *_: None, number, KeyboardInterrupt())
            made = memopt.plan(GRAPH, budget=0.8, strategy=name, progress=report)
            assert made.budget is not None
            assert made.peak_bytes <= made.budget
            happened += 1
    return happened


@dataclass(frozen=True)
class Broken(Strategy):
    """Fails, or says something that is wrong."""

    how: str = "fails"

    name: ClassVar[str] = "broken"
    needs: ClassVar[str] = "chain"

    def solve(self, cost_model: Any, budget_bytes: int | None, **_: Any) -> Solution:
        if self.how == "fails":
            raise Injected("the solver")
        good = memopt.plan(cost_model, strategy="store-all", progress=False).chain_steps
        assert good is not None
        steps = good[:-1] if self.how == "leaves out" else good
        return Solution(Status.OPTIMAL, steps=steps, lower_bound_s=0.0)


@fault(Part.PLANNING, "a strategy fails", "its own error")
def strategy_fails(_room: Room) -> int:
    error = error_of(lambda: memopt.plan(rotor_toy(), strategy=Broken(), progress=False))
    assert isinstance(error, Injected)
    return 1


@fault(Part.PLANNING, "a strategy's plan is wrong, or over its budget", "InvalidProgramError")
def strategy_lies(_room: Room) -> int:
    for how, budget in (("leaves out", None), ("too large", 0.7)):
        error = error_of(
            lambda how=how, budget=budget: memopt.plan(
                rotor_toy(), strategy=Broken(how), budget=budget, progress=False
            )
        )
        assert isinstance(error, InvalidProgramError), error
    return 2


@contextmanager
def broken_planning(room: Room, error: BaseException) -> Iterator[None]:
    """Plans cannot be made."""
    with room.patch.context() as patch:
        patch.setattr(wrap, "make_plan", failing(wrap.make_plan, 1, error))
        patch.setattr(torch_compile, "plan", failing(torch_compile.plan, 1, error))
        yield


def wrapped(room: Room, **more: Any) -> nn.Module:
    room.patch.setenv("MEMOPT_CACHE_DIR", str(room.folder / str(next(_PLANS))))
    given = {"loss_fn": LOSS, "targets": (batch()[1],), "progress": False, **more}
    return memopt.wrap(built(), budget=given.pop("budget", "min"), **given)


def compiled(room: Room, **more: Any) -> nn.Module:
    torch._dynamo.reset()
    options = {"budget": "min", "progress": False, "cache": False, **more}
    return torch.compile(built(), backend=memopt_backend, options=options)  # type: ignore[return-value]


MAKES: dict[str, Callable[..., nn.Module]] = {"a wrapped model": wrapped, "torch.compile": compiled}


def first_call_fails(room: Room, make: Callable[..., nn.Module], error: BaseException) -> None:
    """The first call's planning fails; the second plans, and is eager's."""
    model = make(room)
    optimizer = adam(model)
    twin = built()
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with broken_planning(room, error):
        found = error_of(lambda: model(batch()[0]))
    assert isinstance(found, type(error)) or type(error).__name__ in repr(found), found
    assert_same((model.state_dict(), torch.get_rng_state()), before)
    expected = step(twin, adam(twin), before[1])
    assert_same(step(model, optimizer, before[1]), expected)


def step(model: nn.Module, optimizer: Optimizer, random_state: Tensor) -> list[Tensor]:
    x, y = batch()
    torch.set_rng_state(random_state)
    loss = LOSS(model(x), y)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [*found, *(v.clone() for v in model.state_dict().values()), torch.get_rng_state()]


def _first(make: Callable[..., nn.Module], error: BaseException, room: Room) -> int:
    first_call_fails(room, make, error)
    return 1


for _name, _make in MAKES.items():
    for _what, _error in (
        ("Ctrl-C", KeyboardInterrupt()),
        ("an error", Injected("in planning")),
    ):
        fault(
            Part.WRAPPED,
            f"{_what} in the planning of the first call of {_name}",
            "model and random state as before; the next call is planned, and right",
            slow=True,
        )(functools.partial(_first, _make, _error))


def _steps_fail(make: Callable[..., nn.Module], room: Room) -> int:
    model = make(room)
    inner: nn.Module = getattr(model, "_orig_mod", model)
    optimizer = adam(model)
    twin = built()
    other = adam(twin)
    begin = torch.get_rng_state()
    # A plan that charges what the loop needs, or a better one, is made in one of the first calls.
    for _ in range(3):
        assert_same(step(model, optimizer, begin), step(twin, other, begin))
    x, y = batch()

    def attempt(point: AtOperator) -> None:
        # Under any mode the guards on tensors fail, and the call would be compiled again.
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True), point:
            LOSS(model(x), y).backward()

    happened = 0
    for number in itertools.count(1, 1 if room.everywhere else 20):
        model.zero_grad(set_to_none=True)
        inner.load_state_dict(twin.state_dict())
        trained = [p.detach().clone() for p in model.parameters()]
        point = AtOperator(number)
        error = error_of(functools.partial(attempt, point))
        assert_same([p.detach() for p in model.parameters()], trained)
        if error is None:
            assert point.seen < number, "the operator was reached"
            break
        assert isinstance(error, Injected), error
        happened += 1
    model.zero_grad(set_to_none=True)
    inner.load_state_dict(twin.state_dict())
    assert_same(step(model, optimizer, begin), step(twin, other, begin))
    return happened


for _name, _make in MAKES.items():
    fault(
        Part.WRAPPED,
        f"an operator fails in a planned step of {_name}",
        "its own error; the next step is right",
        slow=True,
    )(functools.partial(_steps_fail, _make))


def _too_small(make: Callable[..., nn.Module], room: Room) -> int:
    model = make(room, budget=1)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    error = error_of(lambda: model(batch()[0]))
    assert isinstance(error, InfeasibleBudgetError) or "InfeasibleBudget" in repr(error), error
    assert_same((model.state_dict(), torch.get_rng_state()), before)
    return 1


for _name, _make in MAKES.items():
    fault(
        Part.WRAPPED,
        f"the budget of {_name} is too small",
        "an error that names the smallest; model and random state as before",
        slow=True,
    )(functools.partial(_too_small, _make))


@fault(
    Part.WRAPPED,
    "kept plans of a wrapped model are put in one another's place",
    "the budget asked for is kept, and the step is right",
    slow=True,
)
def swapped_files(room: Room) -> int:
    first = wrapped(room, budget=None)
    x, _ = batch()
    first(x)
    second = memopt.wrap(built(), budget="min", loss_fn=LOSS, targets=(batch()[1],), progress=False)
    second(x)
    smallest = second.memopt.plans[0].peak_bytes  # type: ignore[union-attr]
    assert first.memopt.plans[0].peak_bytes > smallest  # type: ignore[union-attr]
    third = memopt.wrap(
        built(), budget=smallest, loss_fn=LOSS, targets=(batch()[1],), progress=False
    )
    third(x)
    files = [*room.folder.glob("*/plans-v1/*.json")]
    assert len(files) == 3
    loaded = {path: memopt.load(path) for path in files}
    large = next(path for path, plan in loaded.items() if plan.budget is None)
    asked = max(files, key=lambda path: path.stat().st_mtime_ns)
    asked.write_bytes(large.read_bytes())
    again = memopt.wrap(
        built(), budget=smallest, loss_fn=LOSS, targets=(batch()[1],), progress=False
    )
    begin = torch.get_rng_state()
    twin = built()
    assert_same(step(again, adam(again), begin), step(twin, adam(twin), begin))
    found = again.memopt.plans[-1]  # type: ignore[union-attr]
    assert found.peak_bytes <= smallest
    return 1

"""A model that cannot be captured whole trains in parts, within one budget."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import CaptureError
from memopt.executor.calls import Calls
from memopt.executor.parts import MOST_KINDS
from memopt.executor.self_planning import planning_of
from memopt.pricing.memory import metered
from tests.users.part_models import (
    Blocks,
    Checkpointed,
    Counted,
    Drawing,
    HalfUsed,
    Holding,
    KeepsKeys,
    Ragged,
    ReadsState,
    Routed,
    Selecting,
    Softened,
    Spare,
    Spoken,
    Twice,
    UsesDoubled,
    UsesMethod,
    layers,
)

CPU = torch.device("cpu")
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings("ignore:.*Its sub-modules are planned instead")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *given: Any) -> int:
    held = [*model.parameters(), *model.buffers(), *given]
    held += [t for state in optimizer.state.values() for t in state.values()]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in held}.values())


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def training(
    model: nn.Module,
    steps: int,
    metered_from: int = 99,
    loss_of: Callable[[nn.Module], torch.Tensor] = mean_square,
    given: tuple[torch.Tensor, ...] = (X,),
) -> tuple[list[torch.Tensor], int]:
    """The losses of a training, and the peak of its later steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, most = [], 0
    for step in range(steps):
        if step < metered_from:
            loss = loss_of(model)
            loss.backward()
        else:
            with metered(CPU) as used:
                loss = loss_of(model)
                loss.backward()
            most = max(most, resident_bytes(model, optimizer, *given) + used.peak_bytes)
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses, most


def in_parts(model: nn.Module, budget: Any = "min", **options: Any) -> nn.Module:
    options = {"strategy": "rotor", "parts": "auto", "progress": False, **options}
    return memopt.wrap(model, budget, **options)


MIDDLES = (Routed, Spoken, Twice, Checkpointed, Drawing, UsesMethod, UsesDoubled)


@pytest.mark.parametrize("middle", MIDDLES, ids=lambda one: one.__name__)
def test_the_same_losses_bit_for_bit_within_the_budget(middle: type[nn.Module]) -> None:
    expected, unplanned_bytes = training(Blocks(middle), 7, 5)
    model = in_parts(Blocks(middle))
    losses, most = training(model, 7, 5)
    assert all(map(torch.equal, losses, expected))
    assert most <= model.memopt.parts.shared.peak_bytes()
    assert most <= unplanned_bytes
    assert model.calls.original == 0
    report = model.memopt.report()
    assert "planned: head: rotor" in report
    assert "runs as it is: blocks.0: the model " in report
    assert ("not planned: blocks.0.idle: not called" in report) == (middle is Twice)
    if issubclass(middle, UsesMethod):
        assert "planned: blocks.0.tower.inner: rotor" in report


def test_a_budget_in_between_is_used() -> None:
    bounds = []
    for budget in ("min", None):
        model = in_parts(Blocks(Spoken), budget)
        training(model, 4)
        bounds.append(model.memopt.parts.shared.peak_bytes())
    least, most = bounds
    expected, _ = training(Blocks(Spoken), 7)
    model = in_parts(Blocks(Spoken), least + (most - least) // 2)
    losses, found = training(model, 7, 5)
    assert all(map(torch.equal, losses, expected))
    assert found == model.memopt.parts.shared.peak_bytes()
    assert least <= found <= (least + most) // 2
    model = in_parts(Blocks(Spoken), least - 1000)
    with pytest.warns(UserWarning, match=rf"give at least budget={least}"):
        training(model, 4)


def test_copies_evaluation_and_unwrapping() -> None:
    plain, model = Blocks(), in_parts(Blocks())
    training(plain, 3)
    training(model, 3)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    count = model.calls.planned
    assert torch.equal(model.eval()(X), plain.eval()(X))
    with torch.no_grad():
        model.train()(X)
    assert (model.calls.planned, model.calls.original) == (count, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(planning_of(one) for one in twin.modules())
    memopt.unwrap(model)
    for one in model.modules():
        assert one._compiled_call_impl is None
        assert not {"memopt", "calls", "__getstate__"} & one.__dict__.keys()
        assert not one._forward_pre_hooks


def test_the_parts_that_are_named_and_those_that_are_wrapped_already() -> None:
    expected, _ = training(Blocks(), 4)
    model = in_parts(Blocks(), parts=["head"])
    losses, _ = training(model, 4)
    assert all(map(torch.equal, losses, expected))
    assert model.calls.planned == 4
    # What callbacks log: its smallest plan, then the one with which the whole step needs less.
    assert len(model.memopt.plans.lines) == 2
    model.memopt.count_in(counted := Calls())
    model(X).sum().backward()
    assert counted.planned == 1
    assert model.memopt.report().count("planned: ") == 1
    for parts, text in (
        ("nowhere", "got 'nowhere'"),
        ([], "got none"),
        (["head", "head.0"], "'head.0' is inside of 'head'"),
    ):
        with pytest.raises(ValueError, match=text):
            in_parts(Blocks(), parts=parts)
    refused = in_parts(Blocks(), parts=["blocks.0"])
    with pytest.raises(CaptureError, match=r"item\(\)"):
        refused(X)
    nested = Blocks()
    memopt.wrap(nested.head, "min", "rotor", progress=False)
    model = in_parts(nested)
    losses, _ = training(model, 4)
    assert all(map(torch.equal, losses, expected))
    assert nested.head.memopt.calls.planned == 4
    assert "not planned: head: its calls are taken already" in model.memopt.report()


def test_gradients_are_accumulated() -> None:
    def twice(model: nn.Module) -> torch.Tensor:
        mean_square(model).backward()
        return mean_square(model)

    expected, _ = training(Blocks(), 6, loss_of=twice)
    model = in_parts(Blocks())
    losses, _ = training(model, 6, loss_of=twice)
    assert all(map(torch.equal, losses, expected))
    assert model.calls.original == 0


@pytest.mark.parametrize("middle", [Routed, Selecting])
def test_a_refusal_inside_an_attribute_names_the_parts_below(
    middle: Callable[[], nn.Module],
) -> None:
    model = memopt.wrap(Holding(Holding(middle())), "min", "rotor", progress=False)
    with pytest.raises(CaptureError, match="largest sub-modules around it") as raised:
        model(X)
    assert raised.value.modules == ("held", "held.held")
    assert "(held.held." in str(raised.value)


def test_the_names_of_a_wrapped_model_s_modules_are_its_own() -> None:
    model = memopt.wrap(Holding(layers()), "min", "store-all", progress=False, shapes=[X])
    modules = {one.module for one in model.plans[0].graph.operators}
    assert modules <= {name for name, _ in model.named_modules()}


def test_sizes_that_depend_on_data_are_left_unplanned_with_a_notice() -> None:
    plain, model = Ragged(), in_parts(Ragged())
    model.load_state_dict(plain.state_dict())

    def both(rows: int) -> None:
        expected = plain(X, torch.tensor(rows)).square().mean()
        found = model(X, torch.tensor(rows)).square().mean()
        assert torch.equal(found, expected)
        found.backward()

    for rows in range(1, MOST_KINDS + 1):
        both(rows)
    with pytest.warns(UserWarning, match="inner is not planned: its inputs have other shapes"):
        both(MOST_KINDS + 1)
    both(MOST_KINDS + 2)
    assert (model.calls.planned, model.calls.original) == (MOST_KINDS, 2)


def test_a_refusal_names_the_parts_to_plan() -> None:
    model = memopt.wrap(Blocks(), "min", "rotor", progress=False)
    with pytest.raises(CaptureError) as raised:
        model(X)
    named = 'memopt.wrap(model, ..., parts="auto") plans the largest sub-modules'
    assert named in str(raised.value)
    assert "(head, blocks.0.one, blocks.0.other)" in str(raised.value)
    assert raised.value.modules == ("blocks.0",)
    twice = Blocks(lambda: nn.Sequential(Selecting(), Selecting()))  # the second selects, too
    with pytest.raises(
        CaptureError, match=r"a shape depends.*\(head, blocks\.0\.0\.inner\)"
    ) as raised:
        memopt.wrap(twice, "min", "rotor", progress=False)(X)
    assert raised.value.modules == ("blocks.0", "blocks.0.0")
    with pytest.raises(CaptureError) as raised:
        memopt.wrap(Ragged().inner, "min", "rotor", progress=False)(X.to_sparse())
    assert "parts=" not in str(raised.value)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters())
    whole = {"loss_fn": torch.sum, "optimizer": optimizer, "whole_step": True}
    for more in ({}, whole):
        with pytest.raises(CaptureError, match=r'"auto"\).*\(head, blocks\.0\.one,') as raised:
            memopt.plan(model, X, progress=False, **more)
        assert raised.value.modules == ("blocks.0",)


def test_a_model_that_is_called_with_what_no_plan_takes() -> None:
    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = layers()

        def forward(self, x: torch.Tensor, then: Callable[..., torch.Tensor]) -> torch.Tensor:
            return then(self.inside(x))

    whole = memopt.wrap(Asked(), progress=False)
    with pytest.raises(CaptureError, match=r'a builtin_function.*parts="auto".*\(inside\)'):
        whole(X, torch.sum)
    model = memopt.wrap(Asked(), "min", parts="auto", progress=False)
    for _ in range(3):
        model(X, torch.sum).backward()
    assert model.calls.planned == 3  # type: ignore[union-attr]


def test_one_notice_says_what_happens() -> None:
    model = in_parts(Blocks())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        training(model, 3)
    (text,) = [str(one.message) for one in told if "data-dependent" in str(one.message)]
    assert "Its sub-modules are planned instead" in text
    del model
    gc.collect()


def test_a_model_without_any_part_to_plan_is_told_of_once() -> None:
    model = in_parts(Counted())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            model(X).sum().backward()
    assert sum("no part of the model is planned" in str(one.message) for one in said) == 1


def test_a_part_that_no_plan_makes_smaller_runs_as_it_is() -> None:
    """Its planned call held its input, which nothing else did."""
    expected, unplanned_bytes = training(Softened(), 4, 3)
    model = in_parts(Softened())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is planned
        losses, most = training(model, 4, 3)
    assert all(map(torch.equal, losses, expected))
    assert most == unplanned_bytes
    assert "not planned: soft: no plan needs less memory" in model.memopt.report()


def test_a_part_that_runs_again_in_its_backward_is_opened() -> None:
    """It needed more than without a plan: all that it kept, and the original's forward."""
    expected, unplanned_bytes = training(Blocks(HalfUsed), 7, 5)
    model = in_parts(Blocks(HalfUsed))
    with pytest.warns(UserWarning, match="From the next step on blocks.0.fork runs as it is"):
        losses, most = training(model, 7, 5)
    assert all(map(torch.equal, losses, expected))
    assert most <= model.memopt.parts.shared.peak_bytes() <= unplanned_bytes
    assert model.calls.original == 1
    report = model.memopt.report()
    assert "runs as it is: blocks.0.fork: the backward" in report
    assert "planned: blocks.0.fork.wide: rotor" in report
    assert "planned: blocks.0.fork: " not in report


def test_what_a_planned_part_holds_is_not_tried() -> None:
    """A level of it was, in each step, and the part was planned again for what that left there."""
    model = Spoken()
    model.inner = nn.Sequential(nn.Sequential(layers(8)))
    in_parts(model)
    for _ in range(3):
        model.zero_grad()
        mean_square(model).backward()
    assert memopt.running(model).calls == Calls(planned=3)
    assert "not called" not in memopt.running(model).report()  # type: ignore[union-attr]


def test_blocks_get_no_keys_that_a_training_step_does_not_need() -> None:
    """No part could be planned: blocks that get a cache cannot be captured."""
    model, plain = in_parts(KeepsKeys()), KeepsKeys()
    plain.load_state_dict(model.state_dict())
    for _ in range(3):
        mean_square(model).backward()
    for _ in range(3):
        mean_square(plain).backward()
    assert "planned: block:" in memopt.running(model).report()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]


def test_the_first_batch_is_let_go() -> None:
    """The trace that fails leaves cycles, which would hold it."""
    model = memopt.wrap(Routed(), "min", "rotor", parts="auto", progress=False)
    x = X.clone()
    held = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        model(x).square().mean().backward()
        del x
        assert held() is None
    finally:
        gc.enable()


def test_what_only_unused_outputs_need_is_not_planned() -> None:
    """The unused outputs' gradients and what they need were planned: the smallest plans needed more
    than the model without a plan."""
    expected, unplanned_bytes = training(ReadsState(), 5, 4)
    model = in_parts(ReadsState())
    losses, most = training(model, 5, 4)
    assert all(map(torch.equal, losses, expected))
    assert most <= unplanned_bytes
    assert model.calls == Calls(planned=10)
    assert model.tower.above[0].weight.grad is None


def test_outputs_that_are_used_later_are_planned_then() -> None:
    model, plain = in_parts(ReadsState()), ReadsState()
    for step in range(4):
        plain.last = model.last = step > 1
        plain.zero_grad()
        mean_square(plain).backward()
        model.zero_grad()
        # The third step is metered, which cannot be stopped in its backward.
        with pytest.warns(match="uses outputs of tower that") if step == 2 else nullcontext():
            mean_square(model).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            assert found.grad is None or torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
    assert model.calls == Calls(planned=7, original=1)


def test_a_loop_that_holds_outputs_that_it_does_not_use_is_metered() -> None:
    model = in_parts(Spare())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(6):
        with metered(CPU) if step == 5 else nullcontext() as used:
            held = model(X)
            held[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert used is not None
    measured = resident_bytes(model, optimizer, X) + used.peak_bytes
    assert 0 < measured <= model.memopt.parts.shared.peak_bytes()

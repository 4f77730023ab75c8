"""memopt.wrap: a model that plans its own training calls."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.api import wrap as wrap_module
from memopt.errors import CaptureError, GuardError, InfeasibleBudgetError
from memopt.pricing.memory import metered


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(32))


def trained(model: nn.Module, batches: tuple[int, ...], accumulated: int = 1) -> list[float]:
    """Losses of a training with validation between the steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step, batch in enumerate(batches):
        model.train()
        loss = model(torch.randn(batch, 32)).square().mean()
        loss.backward()
        if step % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 32))
    return losses


def test_the_same_losses_bit_for_bit_and_every_step_planned() -> None:
    plain, planned = network(), memopt.wrap(network(), "min", progress=False)
    batches = (16, 8, 16, 8, 16)
    assert trained(planned, batches) == trained(plain, batches)
    assert (planned.calls.planned, planned.calls.original) == (5, 5)
    assert len(planned.memopt.plans) == 2
    for name, value in plain.state_dict().items():
        assert torch.equal(value, planned.state_dict()[name]), name


def test_the_model_stays_the_object_that_it_is() -> None:
    model = network()
    names = set(model.state_dict())
    wrapped = memopt.wrap(model, "min", progress=False)
    assert wrapped is model
    assert set(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None
    memopt.unwrap(model)
    assert model._compiled_call_impl is None
    assert not hasattr(model, "calls")
    with pytest.raises(ValueError, match="not wrapped"):
        memopt.unwrap(model)


def test_accumulated_gradients_are_charged_and_the_budget_kept() -> None:
    plain = network()
    planned = memopt.wrap(network(), "min", loss_fn=lambda y: y.square().mean(), progress=False)
    assert trained(planned, (16,) * 6, accumulated=3) == trained(plain, (16,) * 6, accumulated=3)
    first, later = sorted(planned.memopt.plans, key=lambda plan: plan.peak_bytes)
    gradient_bytes = sum(p.numel() * 4 for p in planned.parameters())
    assert later.peak_bytes == first.peak_bytes + gradient_bytes
    inputs = torch.randn(16, 32)
    planned.train()
    planned(inputs).square().mean().backward()
    resident = sum(t.numel() * t.element_size() for t in [*planned.state_dict().values(), inputs])
    with metered(torch.device("cpu")) as used:
        planned(inputs).square().mean().backward()
    assert resident + gradient_bytes + used.peak_bytes <= later.peak_bytes


def test_a_changed_setting_is_planned_again() -> None:
    model = memopt.wrap(network(), "min", progress=False)
    plain = network()
    trained(model, (8,))
    trained(plain, (8,))
    for one in (model, plain):
        one[0][2].p = 0.5
    assert trained(model, (8, 8)) == trained(plain, (8, 8))
    assert model.calls.replanned == 1
    assert model.calls.planned == 3


@pytest.mark.parametrize("strategy", ["auto", "rotor"])
def test_statistics_averaged_after_training_run_unplanned(strategy: str) -> None:
    """Loops that average weights set batch norm's momentum to None for an epoch without backward
    (Lightning's StochasticWeightAveraging), which no graph holds; here in a known shape, for which
    rotor's plan was to be made again, and a new one."""
    plain, planned = network(), memopt.wrap(network(), "min", strategy, progress=False)
    for model in (plain, planned):
        trained(model, (16,))
        model.train()
        model[-1].reset_running_stats()
        model[-1].momentum = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed(planned)
    passed(plain)
    assert planned.calls.original == 3
    for name, value in plain.state_dict().items():
        assert torch.equal(value, planned.state_dict()[name]), name
    with pytest.warns(UserWarning, match="ran without its plan: .*momentum"):
        found = trained(planned, (16,))
    assert found == trained(plain, (16,))
    for model in (plain, planned):
        model[-1].momentum = 0.1
    assert trained(planned, (16,)) == trained(plain, (16,))
    assert planned.calls.planned == 2


def test_warnings_point_at_the_line_of_the_loop() -> None:
    """Both in a call and in a backward, however deep in memopt and torch they come from."""
    model = memopt.wrap(network().eval(), "min", progress=False)
    with pytest.warns(UserWarning, match="a backward runs through a call in eval mode") as told:
        model(torch.randn(16, 32)).sum().backward()
    assert {one.filename for one in told} == {__file__}
    model.eval()[0].train()
    with pytest.warns(UserWarning, match="ran without its plan: the model itself") as told:
        model(torch.randn(16, 32)).sum().backward()
    assert {one.filename for one in told} == {__file__}
    loss = model.train()(torch.randn(16, 32)).square().sum()
    with pytest.warns(UserWarning, match="is differentiated itself") as told:
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    assert {one.filename for one in told} == {__file__}


def passed(model: nn.Module) -> None:
    """Call a model in training, without a backward."""
    torch.manual_seed(2)
    for batch in (16, 12):
        model(torch.randn(batch, 32))


def test_a_restart_does_not_solve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = trained(memopt.wrap(network(), "min", progress=False), (16, 8))

    def no_solve(*_args: Any) -> Any:
        raise AssertionError("solved again")

    monkeypatch.setattr(wrap_module, "make_plan", no_solve)
    assert trained(memopt.wrap(network(), "min", progress=False), (16, 8)) == losses
    with pytest.raises(AssertionError, match="solved again"):
        trained(memopt.wrap(network(), "min", progress=False), (12,))


def test_plans_on_disk_depend_on_an_optimizers_state_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved = []
    make = wrap_module.make_plan
    monkeypatch.setattr(wrap_module, "make_plan", lambda *args: solved.append(1) or make(*args))
    for kind, options in (
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 1e-4}),
    ):
        model = network()
        optimizer = kind(model.parameters(), **options)
        memopt.wrap(model, "min", optimizer=optimizer, improve=False, progress=False)
        model(torch.randn(8, 32)).square().mean().backward()
    assert len(solved) == 2


def test_plans_that_go_come_back_from_disk_without_being_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = memopt.wrap(network(), "min", most_plans=1, progress=False)
    plain = network()
    solved = []
    make = wrap_module.make_plan
    monkeypatch.setattr(wrap_module, "make_plan", lambda *args: solved.append(1) or make(*args))
    assert trained(model, (16, 8) * 3) == trained(plain, (16, 8) * 3)
    assert len(model.memopt.plans) == 1
    # Each at first, and with the loss and the optimizer's state that it met.
    assert len(solved) == 4


def test_shapes_that_cannot_be_planned_leave_the_model_unwrapped() -> None:
    model = network()
    with pytest.raises(memopt.InfeasibleBudgetError):
        memopt.wrap(model, 100, shapes=[torch.randn(16, 32)], progress=False)
    memopt.wrap(model, "min", shapes=[torch.randn(16, 32)], progress=False)
    assert len(model.memopt.plans) == 1


def test_shapes_are_planned_ahead() -> None:
    model = memopt.wrap(
        network(),
        "min",
        shapes=[torch.randn(16, 32), torch.randn(8, 32)],
        on_mismatch="error",
        progress=False,
    )
    assert len(model.memopt.plans) == 2
    model(torch.randn(8, 32)).sum().backward()
    model.zero_grad()
    with pytest.raises(GuardError, match="no plan for this kind of call"):
        model(torch.randn(4, 32))
    with pytest.raises(GuardError, match=r"planned: argument 0: .*, requires_grad\)"):
        model(torch.randn(8, 32, requires_grad=True))
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(GuardError, match="whether there are gradients already"):
        model(torch.randn(8, 32))


def test_other_calls_run_unplanned_where_asked_and_say_so() -> None:
    model = memopt.wrap(network(), "min", on_mismatch="original", progress=False)
    model(torch.randn(16, 32)).sum().backward()
    model.zero_grad()
    with pytest.warns(UserWarning, match="without its plan"):
        model(torch.randn(4, 32)).sum().backward()
    assert (model.calls.planned, model.calls.original) == (1, 1)


def test_a_wrapped_part_of_a_wrapped_model_is_planned_with_it() -> None:
    model, plain = network(), network()
    memopt.wrap(model[0], "min", progress=False)
    memopt.wrap(model, "min", progress=False)
    assert trained(model, (16, 16)) == trained(plain, (16, 16))
    assert model.calls.planned == 2
    assert model[0].calls.planned == 0


def test_torch_compile_of_a_model_around_runs_it_under_its_plan() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = memopt.wrap(network(), "min", progress=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    model, plain = Around(), network()
    torch.manual_seed(2)
    found = torch.compile(model, backend="eager")(torch.ones(8, 32))
    torch.manual_seed(2)
    assert torch.equal(found, plain(torch.ones(8, 32)) + 1)
    assert model.inner.calls.planned == 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nn\.Module"):
        memopt.wrap(3, "min")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="on_mismatch"):
        memopt.wrap(network(), "min", on_mismatch="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot read the budget"):
        memopt.wrap(network(), "many")
    model = memopt.wrap(network(), 1000, progress=False)
    with pytest.raises(ValueError, match="taken already"):
        memopt.wrap(model, "min")
    with pytest.raises(CaptureError, match=r"copy\.copy\(model\)"):
        torch.jit.script(nn.Sequential(model))
    with pytest.raises(InfeasibleBudgetError, match="smallest feasible budget"):
        model(torch.randn(8, 32))
    assert all(p.grad is None for p in model.parameters())


class Doubling(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class GoingAround(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@pytest.mark.parametrize("kind", [Doubling, GoingAround])
def test_a_call_of_the_models_own_is_refused_and_planned_by_plan(kind: type[nn.Linear]) -> None:
    """A plan of the whole call would run inside of it once more, or never."""
    model, x = kind(32, 32), torch.ones(8, 32)
    with pytest.raises(ValueError, match=rf"{kind.__name__} has a __call__ of its own.*plan\("):
        memopt.wrap(model, "min")
    planned = memopt.plan(model, x, budget="min", progress=False).apply(model)
    assert torch.equal(planned(x), model(x))
    around = memopt.wrap(nn.Sequential(model), "min", progress=False)
    assert torch.equal(around(x), model(x))
    assert around.calls.planned == 1


def test_gradients_that_a_plan_does_not_charge_are_warned_of_once() -> None:
    model = network()
    planned = memopt.plan(model, torch.randn(8, 32), budget="min", progress=False).apply(model)
    planned(torch.randn(8, 32)).sum().backward()
    with pytest.warns(UserWarning, match="accumulate=True"):
        planned(torch.randn(8, 32)).sum().backward()
    charged = memopt.plan(model, torch.randn(8, 32), budget="min", accumulate=True, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        planned(torch.randn(8, 32)).sum().backward()
        charged.apply(model)(torch.randn(8, 32)).sum().backward()


def test_a_plan_is_pickled_as_its_file() -> None:
    model = network()
    plan = memopt.plan(model, torch.randn(8, 32), budget="min", progress=False)
    again = pickle.loads(pickle.dumps(plan))
    assert again.program == plan.program
    assert again.peak_bytes == plan.peak_bytes
    again.apply(model)(torch.randn(8, 32)).sum().backward()
    assert copy.deepcopy(plan) is plan


class Fails(nn.Module):
    """Updates its statistics, then fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.fails = nn.BatchNorm1d(8), nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.fails:
            raise KeyError("the model's own")
        return self.layer(x)


def test_a_model_that_fails_raises_its_own_error_and_goes_on() -> None:
    """As without memopt: its type, and the statistics that it has changed before."""
    planned = Fails().train()
    plain = copy.deepcopy(planned)
    memopt.wrap(planned, "min", "store-all", progress=False)
    for model in (planned, plain):
        for fails, width, raised in ((True, 8, KeyError), (False, 9, RuntimeError)):
            model.fails = fails
            with pytest.raises(raised) as error:
                model(torch.ones(4, width))
            assert error.value.__context__ is None
        with pytest.raises(TypeError):
            model()
        model(torch.ones(4, 8)).sum().backward()
    assert all(map(torch.equal, planned.buffers(), plain.buffers()))
    assert planned.calls.planned == 1


def test_a_last_smaller_batch_has_the_budget_of_the_others() -> None:
    """Three quarters of what a small batch takes hold no more than parameters and gradients."""
    batches = (1024, 1024, 1024, 4, 1024)
    losses, model = trained(network(), batches), network()
    memopt.wrap(model, 0.75, "rotor", progress=False, improve=False)
    assert trained(model, batches) == losses
    assert memopt.running(model).calls.planned == len(batches)
    first, *_, small = sorted(
        memopt.running(model).plans, key=lambda plan: plan.baseline.peak_bytes, reverse=True
    )
    assert small.baseline.peak_bytes * 0.75 < small.peak_bytes <= first.budget == small.budget

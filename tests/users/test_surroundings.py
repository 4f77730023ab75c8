"""A wrapped model's budget holds with what its training loop needs beside it: the loss, the outputs
that it holds, the optimizer's state. The first step cannot know them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.executor.held_memory import is_metered
from memopt.executor.optimizers import AllOptimizers
from memopt.executor.plan_maker import AGAIN
from memopt.executor.surroundings import Surroundings
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of

CPU = torch.device("cpu")
WORDS = 300
TOKENS = torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def language_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, 16), *blocks, nn.Linear(16, WORDS))


def dropped(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(TOKENS).view(-1, WORDS), TOKENS.view(-1))


class Held:
    """A loop that holds its logits and probabilities until it has new ones."""

    def __call__(self, model: nn.Module) -> torch.Tensor:
        self.logits = model(TOKENS)
        self.probabilities = self.logits.view(-1, WORDS).softmax(-1)
        return -self.probabilities.log().gather(1, TOKENS.view(-1, 1)).mean()


class AutoEncoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, deviation = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * deviation.exp()
        return self.decoder(drawn), mean, deviation


def evidence(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(0, 1, 64 * 48).view(48, 64)
    made, mean, deviation = model(x)
    likeness = F.binary_cross_entropy_with_logits(made, x, reduction="none").sum(-1)
    return (likeness - 0.5 * (1 + deviation - mean.square() - deviation.exp()).sum(-1)).mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Callable[[nn.Module], Any]]]] = {
    "language model": (language_model, lambda: dropped),
    "language model, held": (language_model, Held),
    "auto-encoder": (AutoEncoder, lambda: evidence),
}


def training(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int, adapting: bool = True
) -> list[torch.Tensor]:
    """Each step's loss."""
    torch.manual_seed(1)
    kind = torch.optim.AdamW if adapting else torch.optim.SGD
    optimizer = kind(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        found = loss(model)
        found.backward()
        losses.append(found.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def over_bytes(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int:
    """By how much two steps, before which the loop holds nothing, exceed their plan's budget."""
    with metered(CPU) as used:
        for _ in range(2):
            loss(model).backward()
            model.zero_grad()
    plan = model.__dict__["memopt"].plans[-1]
    beside_bytes = plan.loss_bytes + backend_of(CPU).step_scalars_bytes
    return plan.resident_bytes - beside_bytes + used.peak_bytes - plan.budget


@pytest.mark.parametrize("name", LOOPS)
def test_from_the_second_step_on_the_budget_holds(name: str) -> None:
    """With "min" there is not a byte to spare: steps that measure more than planned exceed it."""
    make, loss = LOOPS[name]
    planned = memopt.wrap(make(), "min", progress=False)
    expected = training(make(), loss(), 4)
    assert all(map(torch.equal, training(planned, loss(), 4), expected))
    assert over_bytes(planned, loss()) <= 0
    assert planned.calls.planned == 6
    state_bytes = 2 * sum(p.nbytes for p in planned.parameters())
    plan = planned.memopt.plans[-1]
    assert plan.resident_bytes >= 3 * state_bytes // 2
    assert any("optimizer state" in note for note in plan.notes)


def test_the_first_step_that_exceeded_is_told_of_once_with_the_bytes() -> None:
    model = memopt.wrap(language_model(), "min", progress=False)
    training(model, dropped, 3, adapting=False)
    budget = model.memopt.plans[-1].budget
    model = memopt.wrap(language_model(), budget, progress=False)
    with pytest.warns(UserWarning, match=r"KiB more than its budget .* of the loss") as told:
        training(model, dropped, 4, adapting=False)
    assert len(told) == 1
    assert over_bytes(model, dropped) <= 0
    assert model.memopt.plans[-1].budget == budget


def pipelined(budget: Any) -> tuple[int, int]:
    """Train as a pipeline's stage, two of whose micro-batches wait while a third runs; return the
    budget, and how many bytes of it are free."""
    model = memopt.wrap(language_model(), budget, "rotor", progress=False)

    def step() -> None:
        waiting = []
        for _ in range(4):
            waiting.append(model(TOKENS))
            if len(waiting) == 3:
                output = waiting.pop(0)
                output.sum().backward()
        for output in waiting:
            output.sum().backward()

    for _ in range(3):
        step()
    with metered(CPU) as used:
        step()
    plan = model.memopt.plans[-1]
    fixed_bytes = plan.resident_bytes - plan.loss_bytes - backend_of(CPU).step_scalars_bytes
    return plan.budget, plan.budget - fixed_bytes - used.peak_bytes


@pytest.mark.parametrize("by_itself", [False, True])
def test_other_stages_between_forward_and_backward(
    by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's rank has a budget for each stage: one is not charged with another."""
    monkeypatch.setattr(Surroundings, "_by_itself", lambda _: by_itself)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)]
    first, last = (memopt.wrap(one, "min", "rotor", progress=False) for one in layers)
    for _ in range(3):
        hidden = first(torch.ones(64, 16))
        (last(hidden).log_softmax(-1) ** 2).mean().backward()
    met = [[*one.memopt.around._met.values()][-1].charges for one in (first, last)]
    assert [one.boundary_bytes > 0 for one in met] == [not by_itself, True]


def test_calls_that_await_their_backward_are_charged() -> None:
    least, free = pipelined("min")
    assert 0 <= free < least // 10
    with pytest.warns(UserWarning, match=r"2 more call\(s\) that await their backward"):
        budget, free = pipelined(least + 20_000)
    assert budget == least + 20_000
    assert free >= 0


def test_a_call_that_never_gets_a_backward_is_charged_while_its_output_is_held() -> None:
    plan = memopt.plan(language_model(), TOKENS, progress=False)
    model = memopt.wrap(language_model(), plan.peak_bytes, "rotor", progress=False)

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        model(TOKENS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    held = model(TOKENS)
    step()
    with pytest.warns(UserWarning, match=r"1 more call\(s\) that await their backward"):
        step()
    step()
    del held
    with metered(CPU) as used:
        held = model(TOKENS)
        step()
    assert model.memopt.calls.planned == 6
    planned = model.memopt.plans[-1]
    fixed_bytes = planned.resident_bytes - planned.loss_bytes - backend_of(CPU).step_scalars_bytes
    assert fixed_bytes + used.peak_bytes <= planned.budget
    del held


@pytest.mark.slow
def test_where_no_plan_leaves_room_the_budget_that_does_is_named_and_works() -> None:
    alone = memopt.plan(language_model(), TOKENS, budget="min", progress=False).budget
    model = memopt.wrap(language_model(), alone, progress=False)
    with pytest.warns(UserWarning, match="no plan leaves room") as told:
        training(model, dropped, 4)
    text = next(str(one.message) for one in told if "no plan leaves room" in str(one.message))
    budget = text.partition("budget=")[2].partition(".")[0]
    for written in (int(budget), budget):
        again = memopt.wrap(language_model(), written, progress=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*no plan leaves room")
            warnings.filterwarnings("ignore", message="a step needed")
            training(again, dropped, 4)
            assert over_bytes(again, dropped) <= 0
        assert again.memopt.plans[-1].budget == int(budget)


def test_losses_by_turns_are_charged_as_the_largest_and_planned_again_a_few_times() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        loss.step += 1
        if loss.step % 2:
            return model(TOKENS).sum()
        return dropped(model)

    loss.step = 0
    model = memopt.wrap(language_model(), "min", progress=False)
    training(model, loss, 5)
    assert over_bytes(model, loss) <= 0
    (times,) = [made.again for made in model.memopt.plans.made()]
    assert 1 <= times <= AGAIN


@pytest.mark.slow
def test_a_loss_that_grows_for_ever_is_planned_for_a_bounded_number_of_times() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        loss.step += 1
        output = model(TOKENS).view(-1, WORDS)
        return sum(output.mul(i).exp().sum() for i in range(loss.step))

    loss.step = 0
    model = memopt.wrap(language_model(), "50MiB", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training(model, loss, 1)
        budget = model.memopt.plans[-1].peak_bytes
        model = memopt.wrap(language_model(), budget, progress=False)
        training(model, loss, 20)
    (times,) = [made.again for made in model.memopt.plans.made()]
    assert times <= AGAIN


def test_forwards_without_a_backward_are_not_metered_on() -> None:
    model = memopt.wrap(language_model(), "min", progress=False)
    for _ in range(3):
        model(TOKENS)
    training(model, dropped, 4)
    gc.collect()
    with metered(CPU) as used:
        torch.empty(1000)
    assert used.peak_bytes == 4000
    assert model.calls.planned == 7


def test_two_forwards_before_one_backward_train_as_ever() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return (model(TOKENS) - model(TOKENS.flip(0))).square().mean()

    model = memopt.wrap(language_model(), "min", progress=False)
    expected = training(language_model(), loss, 5)
    assert all(map(torch.equal, training(model, loss, 5), expected))
    assert model.calls.planned == 10


def test_a_profile_of_the_user_s_goes_on() -> None:
    model = memopt.wrap(language_model(), "min", shapes=[TOKENS], progress=False)
    with torch.profiler.profile() as profile:
        dropped(model).backward()
    assert any("log_softmax" in event.key for event in profile.key_averages())


def test_a_profile_of_the_user_s_backward_is_whole() -> None:
    """The loss of a first step is metered by the same profiler, which gives way."""
    model = memopt.wrap(language_model(), "min", progress=False)
    for _ in range(2):
        loss = dropped(model)
        with torch.profiler.profile() as profile:
            loss.backward()
        assert any("log_softmax_backward" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("new_shape_at", [1, 2, 9])
def test_a_profile_with_a_schedule_goes_on(new_shape_at: int) -> None:
    """Another profile would end it, in its warm-up, too, and torch would crash: what would be
    planned or metered then is so in later steps."""
    model = memopt.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "min", progress=False)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    names: set[str] = set()

    def keep(profile: torch.profiler.profile) -> None:
        names.update(event.key for event in profile.key_averages())

    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        warnings.catch_warnings(record=True) as told,
        torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=keep
        ) as profile,
    ):
        warnings.simplefilter("always")
        for step in range(5):
            model(torch.ones(8 if step >= new_shape_at else 4, 8)).sum().backward()
            model.zero_grad()
            profile.step()
    assert "aten::tanh_backward" in names
    unplanned = max(0, 3 - new_shape_at)  # in the warm-up and the recording
    assert (model.calls.planned, model.calls.original) == (5 - unplanned, unplanned)
    said = [str(one.message) for one in told if "torch's profiler runs" in str(one.message)]
    assert len(said) == min(1, unplanned)


def test_steps_under_a_profile_are_no_tries_to_plan_again() -> None:
    """What is met in them is charged once they are over."""
    model = memopt.wrap(language_model(), "min", progress=False)
    training(model, dropped, 1)
    with torch.profiler.profile(), warnings.catch_warnings():
        warnings.simplefilter("error")
        training(model, dropped, AGAIN + 2)
    training(model, dropped, 2)
    assert over_bytes(model, dropped) <= 0


def test_there_is_one_hook_on_optimizers_and_it_goes() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    optimizers, before = AllOptimizers(), len(_global_optimizer_post_hooks)
    first, second = (Surroundings(language_model(), with_state=False) for _ in range(2))
    for one in (first, second):
        optimizers.tell(one)
        assert len(_global_optimizer_post_hooks) == before + 1
    optimizers.tell_no_more(first)
    assert len(_global_optimizer_post_hooks) == before + 1
    del second, one
    gc.collect()
    optimizers.tell_no_more(first)
    assert len(_global_optimizer_post_hooks) == before


def test_a_model_may_go_in_the_midst_of_an_optimizer_s_step() -> None:
    models = [memopt.wrap(language_model(), "min", progress=False) for _ in range(2)]
    optimizer = torch.optim.SGD(language_model().parameters(), 0.1)

    def gone(*_: Any) -> None:
        models.pop()
        gc.collect()

    optimizer.register_step_post_hook(gone)
    optimizer.step()
    assert len(models) == 1


def test_the_state_of_others_optimizers_is_not_charged() -> None:
    model, other = memopt.wrap(language_model(), "min", progress=False), language_model()
    optimizer = torch.optim.AdamW(other.parameters())
    for _ in range(2):
        other(TOKENS).sum().backward()
        optimizer.step()
        dropped(model).backward()
        model.zero_grad()
    assert not any(charges.state_bytes for charges in _charged(model))


def _charged(model: nn.Module) -> list[Any]:
    return [one.charges for one in model.memopt.plans.made()]


def test_which_steps_are_metered() -> None:
    assert [step for step in range(1, 70) if is_metered(step)] == [1, 2, 3, 4, 8, 16, 32, 64]

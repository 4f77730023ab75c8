"""Training loops as people write them: under memopt.wrap the same bits, every step planned, each
within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memopt
from memopt.pricing.memory import metered
from memopt.strategies import Auto
from tests.users.metering import bytes_over

STEPS = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(24))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Training:
    """A model that is trained, its losses, and each step's peak less its budget."""

    model: nn.Module
    kinds: int
    found: list[Any] = field(default_factory=list)
    over_bytes: list[int] = field(default_factory=list)

    def backward(self, scaled: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> None:
        x = torch.randn(16, 24)
        made = self.model.__dict__.get("memopt")
        # Not while it plans, which measures on its own.
        if made is None or len(made.plans) < self.kinds:
            loss = loss_fn(self.model(x))
            scaled(loss).backward()
        else:
            with metered(torch.device("cpu")) as used:
                loss = loss_fn(self.model(x))
                scaled(loss).backward()
            self.over_bytes.append(bytes_over(made.plans[-1], used))
        self.found.append(loss.detach())


def adam(training: Training) -> torch.optim.Optimizer:
    return torch.optim.AdamW(training.model.parameters(), 1e-2)


def accumulating(training: Training) -> None:
    optimizer = adam(training)
    for step in range(STEPS):
        training.backward(lambda loss: loss / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def clipping(training: Training) -> None:
    optimizer = adam(training)
    for step in range(STEPS):
        training.backward()
        if step % 2:
            norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.found.append(norm)
        else:
            nn.utils.clip_grad_value_(training.model.parameters(), 0.001)
        optimizer.step()
        optimizer.zero_grad()


def averaging(training: Training) -> None:
    optimizer = adam(training)
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = copy.deepcopy(training.model).requires_grad_(False).eval()
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(training.model)
        with torch.no_grad():
            for mean, value in zip(own.parameters(), training.model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
            training.found += [own(torch.ones(2, 24)), average(torch.ones(2, 24))]
    training.found += [*average.state_dict().values(), *own.state_dict().values()]


def scaling(training: Training) -> None:
    optimizer, scaler = adam(training), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        factor = float("inf") if step == 3 else 1.0
        training.backward(lambda loss, factor=factor: scaler.scale(loss) * factor)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        training.found.append(torch.tensor(scaler.get_scale()))
    assert training.found[-1] == 4.0


def scheduling(training: Training) -> None:
    optimizer = adam(training)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    for _ in range(STEPS):
        # Gradients of the step before are there while this one's forward runs.
        training.backward(lambda loss: optimizer.zero_grad() or loss)
        optimizer.step()
        scheduler.step()


def keeping_zeros(training: Training) -> None:
    optimizer = adam(training)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        training.backward()
        optimizer.step()


def two_optimizers(training: Training) -> None:
    *first, last = training.model.children()
    optimizers = [
        torch.optim.SGD(nn.ModuleList(first).parameters(), 0.1, momentum=0.9),
        torch.optim.Adam(last.parameters(), 0.01),
    ]
    for step in range(STEPS):
        training.backward()
        optimizers[step % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


LOOPS: dict[str, tuple[Callable[[Training], None], int]] = {
    "accumulating": (accumulating, 2),
    "clipping": (clipping, 1),
    "averaging": (averaging, 1),
    "scaling": (scaling, 1),
    "scheduling": (scheduling, 2),
    "keeping_zeros": (keeping_zeros, 2),
    "two_optimizers": (two_optimizers, 1),
}


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str) -> None:
    loop, kinds = LOOPS[name]
    plain = Training(network(), kinds)
    planned = Training(memopt.wrap(network(), "min", loss_fn=loss_fn, progress=False), kinds)
    for training in (plain, planned):
        torch.manual_seed(1)
        loop(training)
        training.found += training.model.state_dict().values()
    assert same(planned.found, plain.found)
    assert planned.model.calls == memopt_calls(planned=STEPS)
    assert len(planned.over_bytes) >= STEPS - kinds
    assert max(planned.over_bytes) <= 0
    # The smallest is searched for, not what is planned at once.
    assert [one.strategy for one in planned.model.plans] == [Auto()] * len(planned.model.plans)


def memopt_calls(**counts: int) -> Any:
    from memopt.executor.calls import Calls

    return Calls(**counts)


def generator() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def critic() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh()
    )


def penalty(judge: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Of Wasserstein GANs (Gulrajani et al., 2017, equation 3)."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    gradient = torch.autograd.grad(judge(between).sum(), between, create_graph=True)[0]
    return (gradient.norm(2, dim=1) - 1).square().mean()


def adversarial(make: nn.Module, judge: nn.Module, penalised: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    makes = torch.optim.Adam(make.parameters(), 1e-2)
    judges = torch.optim.Adam(judge.parameters(), 1e-2)
    found = []
    for _ in range(3):
        real, fake = torch.randn(6, 8), make(torch.randn(6, 4)).detach()
        loss = judge(fake).mean() - judge(real).mean()
        if penalised:
            loss = loss + 10 * penalty(judge, real, fake)
        judges.zero_grad()
        loss.backward()
        judges.step()
        found.append(loss.detach())
        judge.requires_grad_(False)
        loss = -judge(make(torch.randn(6, 4))).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        judge.requires_grad_(True)
        found.append(loss.detach())
    return [*found, *make.state_dict().values(), *judge.state_dict().values()]


def test_generator_and_discriminator() -> None:
    make, judge = (memopt.wrap(one(), "min", progress=False) for one in (generator, critic))
    expected = adversarial(generator(), critic(), penalised=False)
    assert same(adversarial(make, judge, penalised=False), expected)
    assert make.calls == memopt_calls(planned=6)
    assert judge.calls == memopt_calls(planned=9)


def test_a_gradient_penalty_is_the_original_s_and_said_once() -> None:
    make, judge = (memopt.wrap(one(), "min", progress=False) for one in (generator, critic))
    expected = adversarial(generator(), critic(), penalised=True)
    with pytest.warns(UserWarning, match=r"create_graph=True.*last bits") as warned:
        found = adversarial(make, judge, penalised=True)
    assert same(found, expected)
    assert len(warned) == 1
    assert make.calls == memopt_calls(planned=6)
    assert judge.calls == memopt_calls(planned=9, original=3)


@pytest.mark.filterwarnings("ignore:a planned call's backward is differentiated")
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrap", "plan"])
def test_a_product_with_a_hessian(wrapped: bool) -> None:
    """With respect to parameters: other calls of this kind stay planned. Dropout draws as it drew.
    The second derivative comes in two parts, through the output's own gradient and past it, which
    eager adds up earlier: other last bits."""
    model, x = critic(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    if wrapped:
        planned = memopt.wrap(model, "min", progress=False)
    else:
        planned = memopt.plan(model, x, budget="min", progress=False).apply(model)
    results = []
    for one in (plain, planned):
        torch.manual_seed(4)
        parameters = list(one.parameters())
        loss = one(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        norm = sum(g.square().sum() for g in gradients)
        norm.backward()
        second = [p.grad for p in parameters]
        found = [loss, *gradients, torch.get_rng_state()]
        one.zero_grad()
        one(x).sum().backward()
        results.append(([*found, *(p.grad for p in parameters)], second))
    (expected, expected_second), (found, found_second) = results
    assert same(found, expected)
    torch.testing.assert_close(found_second, expected_second, rtol=1e-5, atol=1e-7)
    assert planned.calls == memopt_calls(planned=1, original=1)


@pytest.mark.parametrize("way", ["functional_call", "set anew"])
def test_a_call_runs_again_with_the_tensors_that_it_had(way: str) -> None:
    """Other parameters are the model's again, or since, when the backward is differentiated."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(6, 8)
    planned = memopt.wrap(copy.deepcopy(model), "min", progress=False)

    def gradients(one: nn.Module) -> tuple[torch.Tensor, ...]:
        given = {name: 2 * value for name, value in one.named_parameters()}
        if way == "functional_call":
            loss = torch.func.functional_call(one, given, (x,)).square().mean()
        else:
            given, loss = dict(one.named_parameters()), one(x).square().mean()
            one.get_submodule("2").weight = nn.Parameter(torch.ones(8, 8))
        return torch.autograd.grad(loss, list(given.values()), create_graph=True)

    with pytest.warns(UserWarning, match="differentiated itself"):
        found = gradients(planned)
    assert same(list(found), list(gradients(model)))
    assert planned.calls == memopt_calls(planned=0, original=1)


def test_a_first_call_with_computed_parameters() -> None:
    """Planning's backwards end there: they freed the user's graph, and failed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(6, 8)
    planned = memopt.wrap(copy.deepcopy(model), "min", progress=False)

    def gradients(one: nn.Module) -> list[Any]:
        given = {"2.weight": one.get_parameter("0.weight").exp()}
        torch.func.functional_call(one, given, (x,)).square().mean().backward()
        return [parameter.grad for parameter in one.parameters() if parameter.grad is not None]

    assert same(gradients(planned), gradients(model))
    assert planned.calls == memopt_calls(planned=1)


def test_a_call_some_of_whose_parameters_are_computed_from_others_is_refused() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(6, 8)
    memopt.wrap(model, "min", progress=False)
    first = next(model.parameters())
    loss = torch.func.functional_call(model, {"2.weight": first * 2}, (x,)).square().mean()
    with pytest.raises(memopt.ExecutionError, match=r"from other .*memopt\.unwrap\(model\)"):
        torch.autograd.grad(loss, first, create_graph=True)


def test_a_forward_that_cannot_run_again_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    memopt.wrap(model, "min", progress=False)
    x = torch.randn(6, 8, requires_grad=True)
    with pytest.raises(memopt.ExecutionError, match=r"memopt\.unwrap\(model\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    memopt.unwrap(model)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()

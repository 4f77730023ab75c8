"""A wrapped model whose calls have ever other lengths: few plans, eager's bits, the budget kept."""

from __future__ import annotations

import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.executor.runtime import Runtime
from memopt.executor.self_planning import SelfPlanning
from memopt.executor.sized_code import polynomial_through
from tests.users.metering import StepMeter

WORDS, WIDTH, LONGEST, STEPS = 40, 16, 64, 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


class Reader(nn.Module):
    """Attention by hand, whose weights grow with the square of the length, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 16))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        query, key, value = self.parts(x).chunk(3, -1)
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        weights = (query @ key.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1)
        x = x + F.dropout(weights, 0.1, self.training) @ value
        logits = self.head(x + self.wide(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def own_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens, tokens)
    return loss


def loss_outside(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def stepped(model: nn.Module, call: Any, tokens: torch.Tensor, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    loss = call(model, tokens)
    loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return [loss.detach(), *gradients, torch.rand(1)]


def lengths(count: int) -> list[int]:
    chosen = random.Random(0)
    return [chosen.randint(3, LONGEST) for _ in range(count)]


@pytest.mark.parametrize("call", [own_loss, loss_outside])
def test_random_lengths_have_few_plans_and_eagers_bits_within_the_budget(
    call: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, meter = Reader(), StepMeter(monkeypatch)
    plain = copy.deepcopy(model)
    longest = torch.zeros(2, LONGEST, dtype=torch.int64)
    inputs = (longest, longest) if call is own_loss else longest
    whole = memopt.plan(Reader(), inputs, strategy="store-all", progress=False)
    budget = int(0.85 * whole.peak_bytes)
    memopt.wrap(model, budget, "rotor", progress=False)
    made: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a step needed")
        for step, length in enumerate(lengths(STEPS)):
            tokens = torch.randint(0, WORDS, (2, length))
            meter.begin()
            found = stepped(model, call, tokens, step)
            over_bytes = meter.end(model.plans[-1])
            expected = stepped(plain, call, tokens, step)
            assert all(map(torch.equal, found, expected)), length
            made = model.plans.lines
            # What lies outside is met in the first steps of a kind.
            assert over_bytes <= 0 or (call is loss_outside and step < 8), length
    assert model.calls.planned == STEPS
    assert model.calls.original == 0
    assert len(made) <= 8
    assert {plan.budget for plan in model.plans} == {budget}


def gpt2() -> nn.Module:
    """As it is made by default: it returns keys and values unless it is called to train."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()


def with_labels(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def timed_choices(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Take the seconds between each call of a wrapped model and its plan's first operator."""
    seconds: list[float] = []
    called, run = SelfPlanning._training_call, Runtime.run

    def begun(asking: SelfPlanning, *args: Any, **kwargs: Any) -> Any:
        seconds.append(-time.perf_counter())
        return called(asking, *args, **kwargs)

    def running(runtime: Runtime, *args: Any) -> Any:
        seconds[-1] += time.perf_counter()
        return run(runtime, *args)

    monkeypatch.setattr(SelfPlanning, "_training_call", begun)
    monkeypatch.setattr(Runtime, "run", running)
    return seconds


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_steps_of_random_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model, meter, seconds = gpt2(), StepMeter(monkeypatch), timed_choices(monkeypatch)
    plain, draw = copy.deepcopy(model), random.Random(0)
    longest = dict.fromkeys(("input_ids", "labels"), torch.zeros(2, 512, dtype=torch.int64))
    whole = memopt.plan(gpt2(), longest, strategy="store-all", progress=False)
    memopt.wrap(model, int(0.6 * whole.peak_bytes), progress=False)
    for step in range(1000):
        tokens = torch.randint(0, 200, (2, draw.randint(16, 512)))
        meter.begin()
        found = stepped(model, with_labels, tokens, step)
        assert meter.end(model.plans[-1]) <= 0, step
        expected = stepped(plain, with_labels, tokens, step)
        assert all(map(torch.equal, found, expected)), step
    assert (model.calls.planned, model.calls.original) == (1000, 0)
    assert len(model.plans.lines) <= 8
    print(f"a plan is chosen in {1e3 * statistics.median(seconds):.2f} ms (median)")


class Keeps(nn.Module):
    """Returns what no graph can hold unless it is called with `use_cache=False`, as planned calls
    are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.config = nn.Embedding(WORDS, WIDTH), transformers.GPT2Config()

    def forward(self, tokens: torch.Tensor, use_cache: bool = True) -> Any:
        loss = self.words(tokens).square().sum()
        return (loss, transformers.DynamicCache()) if use_cache else (loss,)


def test_a_model_that_keeps_keys_shares_plans() -> None:
    model = Keeps().train()
    memopt.wrap(model, None, "store-all", progress=False)
    for length in (10, 12, 14, 11, 9):
        model(torch.zeros(2, length, dtype=torch.int64))[0].backward()
    assert len(model.plans.lines) < 5  # type: ignore[arg-type, union-attr]
    assert model.calls.planned == 5  # type: ignore[union-attr]


class Padded(Reader):
    """Decides by its length."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        more = -tokens.shape[1] % 8
        return super().forward(F.pad(tokens, (0, more)), labels)[:, : tokens.shape[1]]


class Halved(Reader):
    """Computes a size that is no polynomial of its length."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(tokens[:, : tokens.shape[1] // 2 + 1], labels)


class Branching(Reader):
    """Takes another way for long texts."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(tokens, labels)
        return logits * 2 if tokens.shape[1] > 20 else logits


@pytest.mark.parametrize("kind", [Padded, Halved, Branching])
def test_models_that_decide_by_their_length_have_eagers_bits(kind: type[Reader]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    memopt.wrap(model, None, "rotor", progress=False)
    summed = lambda model, tokens: model(tokens).square().sum()  # noqa: E731
    for step, length in enumerate((16, 24, 32, 17, 25, 40)):
        tokens = torch.randint(0, WORDS, (2, length))
        found = stepped(model, summed, tokens, step)
        assert all(map(torch.equal, found, stepped(plain, summed, tokens, step))), length
    assert model.calls.planned == 6


def test_a_changed_model_is_planned_anew_at_any_length() -> None:
    model = Reader()
    memopt.wrap(model, None, "rotor", progress=False)
    for length in (10, 12, 14, 11):
        stepped(model, own_loss, torch.zeros(2, length, dtype=torch.int64), 0)
    model.wide[2].p = 0.25
    plain = copy.deepcopy(model)
    tokens = torch.ones(2, 11, dtype=torch.int64)
    found, expected = stepped(model, own_loss, tokens, 1), stepped(plain, own_loss, tokens, 1)
    assert all(map(torch.equal, found, expected))


def test_polynomials() -> None:
    assert polynomial_through({2: 4, 5: 10}) == (0, 2)
    assert polynomial_through({2: 7, 5: 28, 9: 84}) == (3, 0, 1)
    assert polynomial_through({2: 1, 4: 2, 8: 4}) is None


def test_shorter_calls_share_the_plan_of_a_longer_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    memopt.wrap(model, None, "rotor", progress=False)
    for length in (5, 9, 12, 7, 11, 7):
        x = torch.randn(2, length, 8)
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad), length
    assert len(model.plans.lines) == 3
    assert model.calls.planned == 6


class Notes(nn.Module):
    """Leaves what it did in an attribute that it does not read."""

    def __init__(self, noted: Callable[[int], Any]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.noted, self.last = noted, None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.last = self.noted(tokens.shape[1])
        loss: torch.Tensor = self.head(self.words(tokens)).square().mean()
        return loss


NOTED: dict[str, tuple[Callable[[int], Any], int]] = {
    "a constant": (lambda length: False, 8),
    "whether it is long": (lambda length: "long" if length > 40 else "short", 11),
    "a quotient": (lambda length: length // 30, 16),
}


@pytest.mark.parametrize("kind", NOTED)
def test_what_each_call_notes_is_noted_whatever_the_plan(kind: str) -> None:
    noted, most = NOTED[kind]
    model = Notes(noted)
    memopt.wrap(model, None, "store-all", progress=False, cache=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*plans were made")
        for length in (20, 21, 22, 23, 24, 28, 30, 40, 44, 8, 41, 33, 1000, 999, 60, 12):
            model(torch.zeros(2, length, dtype=torch.int64)).backward()
            assert model.last == noted(length), length
    assert model.calls.planned == 16  # type: ignore[union-attr]
    assert len(model.plans.lines) <= most  # type: ignore[union-attr]

"""Weights that are computed when they are read, and recurrent modules of such weights: normed,
pruned, dropped, replaced. They are computed as often as eager does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import memopt

WEIGHT = "weight_hh_l0"


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.body(self.words(words))[0]
        return found @ self.words.weight.T


class WeightDropped(Tagger):
    """Drops elements of a recurrent weight in each step (Merity et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(getattr(self.body, WEIGHT).detach().clone())
        delattr(self.body, WEIGHT)
        setattr(self.body, WEIGHT, self.kept.clone())

    def forward(self, words: Tensor) -> Tensor:
        setattr(self.body, WEIGHT, nn.functional.dropout(self.kept.clone(), 0.3, self.training))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            return super().forward(words)


def plain_step(model: nn.Module, words: Tensor) -> Any:
    return model(words)


def replaced(model: nn.Module, words: Tensor) -> Any:
    given = {name: p * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, given, (words,))


def changed(change: Callable[..., Any], **how: Any) -> Callable[[], Tagger]:
    def make() -> Tagger:
        model = Tagger()
        change(model.body, WEIGHT, **how)
        return model

    return make


FORMS: dict[str, tuple[Callable[[], Tagger], Callable[[nn.Module, Tensor], Any]]] = {
    "normed": (changed(parametrizations.weight_norm), plain_step),
    "spectrally normed": (changed(parametrizations.spectral_norm), plain_step),
    "pruned": (changed(prune.l1_unstructured, amount=0.5), plain_step),
    "dropped": (WeightDropped, plain_step),
    "replaced": (Tagger, replaced),
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_eagers(form: str) -> None:
    make, call = FORMS[form]
    model, planned = make(), make()
    memopt.wrap(planned, "min", progress=False, improve=False)
    for step in range(4):
        for one in (model, planned):
            torch.manual_seed(step)
            words = torch.randint(9, (3, 4))
            call(one, words).square().mean().backward()
            one.eval()
            with torch.no_grad():
                one.last = one(words)
            one.train()
            for parameter in one.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad)
        assert torch.equal(model.last, planned.last)
    expected = (*model.parameters(), *model.buffers())
    assert all(map(torch.equal, expected, (*planned.parameters(), *planned.buffers())))
    assert memopt.running(planned).calls.planned == 4


class Counted(nn.Module):
    """Counts how often it is computed, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.count.add_(1)
        return nn.functional.dropout(weight, 0.5, self.training)


class Looking(nn.Module):
    """Looks for a weight that is computed, by `look`."""

    def __init__(self, look: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.part, self.look = nn.Linear(4, 4), nn.Linear(4, 4), look
        parametrize.register_parametrization(self.part, "weight", Counted(), unsafe=True)

    @property
    def gone(self) -> Tensor:
        return self.part.nothing

    def forward(self, x: Tensor) -> Tensor:
        found = self.look(self)
        return self.head(x) * (found.sum() if isinstance(found, Tensor) else found)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "is there": lambda m: 2 if hasattr(m.part, "weight") else 3,
    "is there, and read": lambda m: m.part.weight if hasattr(m.part, "weight") else 3,
    "or else": lambda m: 2 if getattr(m.part, "weight", None) is not None else 3,
    "or else, read": lambda m: getattr(m.part, "weight", 3),
    "fails, or else": lambda m: getattr(m, "gone", 3),
    "fails": lambda m: 2 if hasattr(m, "gone") else 3,
    "read": lambda m: m.part.weight,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_weight_is_computed_as_often_as_eager_does(look: str) -> None:
    model, planned = Looking(LOOKS[look]), Looking(LOOKS[look])
    memopt.wrap(planned, "min", progress=False, improve=False)
    for step in range(3):
        found = []
        for one in (model, planned):
            torch.manual_seed(step)
            output = one(torch.randn(2, 4))
            output.sum().backward()
            found.append([output, torch.get_rng_state(), *one.buffers()])
        assert all(map(torch.equal, *found)), step

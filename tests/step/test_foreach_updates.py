"""Parameters of a CPU step together by the foreach form, where that has the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from memopt.pricing.memory import metered
from memopt.step.foreach_updates import foreach_options
from memopt.step.optimizer_state import PER_PARAMETER
from memopt.step.step_optimizer import Groups, Touch, update_all, update_one
from memopt.step.trial import equal_bytes

OPTIONS: dict[Any, list[dict[str, Any]]] = {
    torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, {"lr": 0.3}],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True, "weight_decay": 0.0}, {"eps": 0.0, "lr": 0.5}],
    torch.optim.RMSprop: [{}, {"momentum": 0.9, "centered": True}, {"weight_decay": 0.1}],
    torch.optim.Adagrad: [{}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    torch.optim.NAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    torch.optim.Adamax: [{}, {"weight_decay": 0.1}],
    torch.optim.Adadelta: [{}, {"rho": 0.5, "weight_decay": 0.1}],
}
CASES = [(kind, options) for kind, every in OPTIONS.items() for options in every]


def _made(kind: Any, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((40, 13), (7,), (3, 3, 5))]
    return parameters, kind(parameters, **options)


def _gradients(step: int) -> list[torch.Tensor]:
    torch.manual_seed(10 + step)
    # Columns first, unlike the parameter.
    return [torch.randn(13, 40).t(), torch.randn(7), torch.randn(3, 3, 5)]


def test_every_optimizer_is_here() -> None:
    assert set(OPTIONS) == set(PER_PARAMETER)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_bits_and_memory_together_and_alone(kind: Any, options: dict[str, Any]) -> None:
    """Together they take no more memory than their updates one by one, added up."""
    (one_by_one, alone), (at_once, together) = _made(kind, options), _made(kind, options)
    group = together.param_groups[0]
    # Adagrad's foreach form takes more memory, NAdam's rounds otherwise.
    apart = kind in (torch.optim.Adagrad, torch.optim.NAdam)
    assert foreach_options(kind, group, at_once) == ({} if apart else {"foreach": True})
    for step in range(3):
        taken_bytes = 0
        for parameter, gradient in zip(one_by_one, _gradients(step), strict=True):
            with metered(torch.device("cpu")) as use:
                update_one(alone, parameter, gradient)
            taken_bytes += use.peak_bytes
        gradients, touch = _gradients(step), Touch(together, *at_once)
        with metered(torch.device("cpu")) as use:
            update_all(together, [*at_once], gradients, touch, Groups(together).of(at_once))
        assert use.peak_bytes <= taken_bytes
        assert all(map(touch.changed, range(3)))
    assert [p.grad for p in at_once] == [None] * 3
    for mine, other in zip(at_once, one_by_one, strict=True):
        assert equal_bytes(mine, other)
        states = together.state[mine], alone.state[other]
        assert states[0].keys() == states[1].keys()
        tensors = zip(states[0].values(), states[1].values(), strict=True)
        assert all(equal_bytes(a, b) for a, b in tensors if torch.is_tensor(a))


def test_options_of_the_user_stay() -> None:
    parameters, optimizer = _made(torch.optim.AdamW, {})
    (group,) = optimizer.param_groups
    assert foreach_options(torch.optim.AdamW, group, parameters) == {"foreach": True}
    for chosen in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        assert foreach_options(torch.optim.AdamW, {**group, **chosen}, parameters) == {}


class OtherOrder(torch.optim.SGD):
    """An optimizer whose two forms round differently."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter in itertools.chain.from_iterable(
            zip(itertools.repeat(group), group["params"], strict=False)
            for group in self.param_groups
        ):
            factor = group["lr"] * (1 / 3)
            change = parameter.grad.mul(factor) if group["foreach"] else parameter.grad.div(3)
            parameter.data.sub_(change if group["foreach"] else change.mul(group["lr"]))


def test_a_form_of_other_bits_is_not_used() -> None:
    parameters, optimizer = _made(OtherOrder, {"lr": 0.7})
    assert foreach_options(OtherOrder, optimizer.param_groups[0], parameters) == {}

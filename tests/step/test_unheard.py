"""Planning runs a model that says something, and nobody hears it."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.step.unheard import unheard

LOG = logging.getLogger("users.model")


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        print("printed")
        print("printed", file=sys.stderr)
        LOG.warning("logged")
        warnings.warn("warned", stacklevel=2)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("whole", [False, True])
def test_planning_says_nothing_of_the_models(
    whole: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Says(), torch.randn(3, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        if whole:
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            memopt.plan(
                model, x, loss_fn=nn.functional.mse_loss, targets=torch.zeros(3, 2), optimizer=sgd,
                strategy="store-all", progress=False, cache=False,
            )  # fmt: skip
        else:
            memopt.plan(model, x, progress=False, cache=False)
        assert not any(str(one.message) == "warned" for one in said)
        assert "printed" not in "".join(capfd.readouterr())
        assert not caplog.messages
        model(x)
        model(x)
        assert [str(one.message) for one in said][-1:] == ["warned"]
        assert sum(str(one.message) == "warned" for one in said) == 1
    assert capfd.readouterr() == ("printed\n" * 2, "printed\n" * 2)
    assert caplog.messages == ["logged"] * 2


@functools.lru_cache
def half(n: int) -> float:
    return n / 2


def test_advice_for_compilation_is_unheard() -> None:
    """Dynamo warns of each function under a cache that it traces, in every trace."""

    class Cached(Says):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * half(len(x))
            return y

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        memopt.plan(Cached(), torch.randn(3, 4), progress=False, cache=False)
    assert not [str(one.message) for one in said]


class Scattered(nn.Module):
    """Its backward selects by the mask, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.zeros(len(mask), 2)
        y[mask] = self.layer(x)
        return y


def test_a_refusal_of_a_backward_warns_of_nothing() -> None:
    """Anomaly detection, which torch switches on there, warned of an error in a backward."""
    mask = torch.arange(6) % 2 == 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(memopt.CaptureError, match="a shape depends on the values"):
            memopt.plan(Scattered(), (torch.randn(3, 4), mask), progress=False, cache=False)
    assert not [str(one.message) for one in said]


def test_others_are_heard(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def other() -> None:
        print("of another thread")
        LOG.warning("of another thread")
        warnings.warn("of another thread", stacklevel=1)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = sys.stdout, warnings.showwarning, logging.Logger.callHandlers
        with unheard():
            kept = sys.stdout
            print("withheld")
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            nn.functional.mse_loss(torch.zeros(2, 1), torch.zeros(1, 2))
        assert before == (sys.stdout, warnings.showwarning, logging.Logger.callHandlers)
    print("kept", file=kept)
    assert capsys.readouterr().out == "of another thread\nkept\n"
    assert caplog.messages == ["of another thread"]
    first, second = (str(one.message) for one in said)
    assert first == "of another thread"
    assert "target size" in second, "torch's warnings are kept"

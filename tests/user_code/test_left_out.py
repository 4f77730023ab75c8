"""What a forward prints, logs or warns of is no reason not to plan it, and is said to be left
out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memopt.capture.capture import capture
from memopt.step.inputs import to_call
from memopt.user_code import left_out

LOUD, QUIET = logging.getLogger("tests.loud"), logging.getLogger("tests.quiet")
LOUD.setLevel(logging.DEBUG)
QUIET.setLevel(logging.ERROR)


class Speaking(nn.Module):
    """A layer, and something that is said before it."""

    def __init__(self, say: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.say = nn.Linear(3, 3), say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.say(x)
        return self.layer(x).relu()


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "_TOLD", set())


def hushed(_: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("ignore", category=UserWarning)


SAID: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    (r"print\(\)", lambda x: print("shape", x.shape, x.dtype)),
    (r"print\(\)", lambda x: print(f"mean {x.mean()}", flush=True)),
    (r"print\(\)", lambda x: print(x.mean().item())),
    (r"getLogger\('tests.loud'\).info", lambda x: LOUD.info("shape %s", x.shape)),
    (r"getLogger\('tests.loud'\).debug", lambda x: LOUD.isEnabledFor(10) and LOUD.debug("x")),
    (r"getLogger\('tests.loud'\).log", lambda x: logging.LoggerAdapter(LOUD, {}).info("x")),
    (r"getLogger\('tests.loud'\).info", lambda x: logging.getLogger("tests.loud").info("x")),
    (r"logging.error\(\)", lambda x: logging.error("x")),
    (r"warnings.warn\(\)", lambda x: warnings.warn("x", stacklevel=1)),
]


@pytest.mark.parametrize(("what", "say"), SAID)
def test_it_is_planned_and_said_once_to_be_left_out(
    what: str, say: Callable[[torch.Tensor], Any]
) -> None:
    model, call = Speaking(say), to_call(torch.randn(2, 3))
    with pytest.warns(UserWarning, match=what) as told:
        capture(model, call)
    (told_of,) = [one for one in told if "planned steps leave out" in str(one.message)]
    assert "test_left_out.py" in str(told_of.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, call)


@pytest.mark.parametrize(
    "say",
    [
        lambda x: QUIET.info("x"),
        lambda x: QUIET.isEnabledFor(logging.INFO) and QUIET.info("x"),
        lambda x: logging.getLogger("tests.quiet").debug("x"),
        hushed,
    ],
)
def test_what_would_not_show_is_not_spoken_of(say: Callable[[torch.Tensor], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Speaking(say), to_call(torch.randn(2, 3)))


def test_the_logging_module_is_as_it_was() -> None:
    with pytest.warns(UserWarning, match="leave out"):
        capture(Speaking(SAID[0][1]), to_call(torch.randn(2, 3)))
    assert not hasattr(logging.getLogger, "_dynamo_marked_constant")

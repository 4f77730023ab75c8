"""What a forward looks for and does not find is seen where it is there later."""

from __future__ import annotations

import os
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.capture.capture import capture
from memopt.errors import CaptureError
from memopt.step.inputs import to_call

NAME = "MEMOPT_TEST_ABSENCES"


class Box:
    """A container written in Python."""

    def __init__(self) -> None:
        self.kept: dict[str, float] = {}

    def __getitem__(self, key: str) -> float:
        return self.kept[key]


class Looking(nn.Module):
    def __init__(self, look: Callable[[Looking], float]) -> None:
        super().__init__()
        self.linear, self.look = nn.Linear(3, 3), look
        self.kept: dict[str, float] = {}
        self.ordered: OrderedDict[str, float] = OrderedDict()
        self.box, self.space = Box(), types.SimpleNamespace()
        self.blocks = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.look(self)


def tried(read: Callable[[Any], Any], error: type[Exception]) -> Callable[[Looking], float]:
    def look(model: Looking) -> float:
        try:
            read(model)
        except error:
            return 0.5
        return 2.0

    return look


def found(present: Callable[[Any], Any]) -> Callable[[Looking], float]:
    def look(model: Looking) -> float:
        return 2.0 if present(model) else 0.5

    return look


def set_variable(_: Looking) -> None:
    os.environ[NAME] = "1"


def set_attribute(model: Any) -> None:
    model.later = 1.0


SITUATIONS: dict[str, tuple[Callable[[Looking], float], Callable[[Any], None]]] = {
    "a dict's key": (
        tried(lambda model: model.kept["a"], KeyError),
        lambda model: model.kept.update(a=1.0),
    ),
    "an ordered dict's key": (
        tried(lambda model: model.ordered["a"], KeyError),
        lambda model: model.ordered.update(a=1.0),
    ),
    "a key inside an object": (
        tried(lambda model: model.box["a"], KeyError),
        lambda model: model.box.kept.update(a=1.0),
    ),
    "a module's name": (
        tried(lambda model: model.blocks["a"], KeyError),
        lambda model: model.blocks.update({"a": nn.Identity()}),
    ),
    "a module's attribute": (tried(lambda model: model.later, AttributeError), set_attribute),
    "an attribute by getattr": (
        tried(lambda model: getattr(model, "later"), AttributeError),  # noqa: B009
        set_attribute,
    ),
    "an object's attribute": (
        tried(lambda model: model.space.later, AttributeError),
        lambda model: set_attribute(model.space),
    ),
    "a class's attribute": (
        tried(lambda model: type(model).later, AttributeError),
        lambda model: set_attribute(type(model)),
    ),
    "vars": (found(lambda model: "later" in vars(model)), set_attribute),
    "a length of vars": (
        found(lambda model: len(vars(model.space))),
        lambda model: set_attribute(model.space),
    ),
    "a Python module's attribute": (
        found(lambda model: getattr(os, NAME, False)),
        lambda model: setattr(os, NAME, True),
    ),
    "os.environ[]": (tried(lambda model: os.environ[NAME], KeyError), set_variable),
    "os.environ.get": (found(lambda model: os.environ.get(NAME)), set_variable),
    "os.getenv": (found(lambda model: os.getenv(NAME)), set_variable),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    os.environ.pop(NAME, None)
    for owner, name in ((os, NAME), (Looking, "later")):
        if name in vars(owner):
            delattr(owner, name)


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_there_later_is_seen(name: str) -> None:
    look, put = SITUATIONS[name]
    model, x = Looking(look), torch.ones(2, 3)
    if name == "a length of vars" and torch.__version__.startswith("2.11"):
        with pytest.raises(CaptureError):  # which that torch does not trace
            capture(model, to_call((x,)))
        return
    dependencies = capture(model, to_call((x,))).dependencies
    assert look(model) == 0.5
    assert dependencies.unchanged(model)
    put(model)
    assert look(model) == 2.0
    assert not dependencies.unchanged(model)


def test_a_variable_that_changes_is_seen() -> None:
    model = Looking(lambda _: float(os.getenv(NAME, "1")))
    os.environ[NAME] = "2"
    dependencies = capture(model, to_call((torch.ones(2, 3),))).dependencies
    assert dependencies.unchanged(model)
    os.environ[NAME] = "3"
    assert not dependencies.unchanged(model)

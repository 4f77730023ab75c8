"""One way in which a forward touches, or is touched by, what is around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

WAYS = ("plan", "wrap", "train_step", "backend")
MODULE_WAYS = ("plan", "wrap", "backend")


class Net(nn.Module):
    """Two layers; what a situation is about happens in `touch`, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def touch(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.last(self.touch(torch.tanh(self.first(x))))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def nothing(*_: Any) -> None:
    pass


def momentum(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@dataclass
class Setting:
    """A model and its world, made afresh for each run.

    Attributes:
        model: what is trained.
        world: everything that the forward, or what hangs on it, may change beside the model.
        loss: the training loop's.
        inputs: the arguments of a step beside the batch.
        before, between, after: what the loop does before a step's forward, between forward and
            backward, and when the step is done and looked at.
        ready: what the user does with the module when it has been planned.
        around: what a step's forward and loss run in.
        call: how the loop calls the module.
        optimizer: makes it.
        owned: modules beside the model whose state is the user's.
    """

    model: nn.Module
    world: Callable[[], Any] = nothing
    loss: Callable[[Any, Tensor], Tensor] = mean_square
    inputs: Callable[[int], tuple[Any, ...]] = lambda _: ()
    before: Callable[[int], None] = nothing
    between: Callable[[int], None] = nothing
    after: Callable[[int], None] = nothing
    ready: Callable[[Any], None] = nothing
    call: Callable[[Any, tuple[Any, ...]], Any] = lambda module, args: module(*args)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] = momentum
    owned: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Situation:
    """A named one.

    Attributes:
        names: what a refusal must say: the touched object, as a regular expression.
        exact: the ways in which users expect it to be exact; in the others it may be refused.
        ways: those in which it can be.
        quick: whether it runs with every test run.
        torchs: why torch.compile alone is not as eager; under "backend" it need not be, but exactly
            as with backend="aot_eager". Or why a step that is refused there has run in part.
        says: whether the forward says something, which planned steps leave out with a notice.
    """

    name: str
    make: Callable[[], Setting]
    names: str
    exact: tuple[str, ...] = ()
    ways: tuple[str, ...] = WAYS
    quick: bool = False
    says: bool = False
    torchs: str = ""


SITUATIONS: dict[str, Situation] = {}


def situation(
    name: str, names: str, **how: Any
) -> Callable[[Callable[[], Setting]], Callable[[], Setting]]:
    """Enter what makes a setting in the table."""

    def enter(make: Callable[[], Setting]) -> Callable[[], Setting]:
        assert name not in SITUATIONS, name
        SITUATIONS[name] = Situation(name, make, names, **how)
        return make

    return enter


@dataclass
class Tracker:
    """An object of the user's that keeps what it is given."""

    kept: list[Any] = field(default_factory=list)
    count: int = 0

    def keep(self, value: Any) -> None:
        self.count += 1
        self.kept.append(value)

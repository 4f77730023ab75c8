"""How a loop calls the model: through others, in threads, in contexts, with tensors of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.surroundings.situation import MODULE_WAYS, Net, Setting, mean_square, situation

DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=1)


class Dropping(Net):
    def touch(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.5, self.training)


class ByDepth(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h / DEPTH.get()


def in_thread(work: Callable[[], Any]) -> Any:
    """What work gives when another thread does it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - it is raised where the thread is waited for
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@situation("called in another thread", "[Tt]hread", ways=MODULE_WAYS, exact=("plan", "wrap"))
def _() -> Setting:
    return Setting(Dropping(), call=lambda module, args: in_thread(lambda: module(*args)))


@situation("called in another thread and in this one", "[Tt]hread", ways=MODULE_WAYS)
def _() -> Setting:
    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        other = in_thread(lambda: module(torch.ones(4, 6)))
        y: Tensor = module(*args) + other
        return y

    return Setting(Net(), call=call)


@situation(
    "checkpointed by the caller", "checkpoint|[Ss]aved[- ]tensors?[- ]hook", ways=MODULE_WAYS
)
def _() -> Setting:
    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        y: Tensor = checkpoint(module, *args, use_reentrant=False)
        return y

    return Setting(Dropping(), call=call)


@situation("checkpointed reentrantly by the caller", "checkpoint|reentrant", ways=MODULE_WAYS)
def _() -> Setting:
    class Shifted(Dropping):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            y: Tensor = super().forward(x + shift)
            return y

    shift = torch.zeros(6, requires_grad=True)

    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        y: Tensor = checkpoint(module, *args, use_reentrant=True)
        return y

    return Setting(Shifted(), lambda: shift.grad, inputs=lambda _: (shift,), call=call)


@situation("called first without gradients", "no_grad", ways=MODULE_WAYS, exact=("plan", "wrap"))
def _() -> Setting:
    class Counts(Dropping):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def touch(self, h: Tensor) -> Tensor:
            y: Tensor = self.norm(super().touch(h))
            return y

    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        with torch.no_grad():
            wanted = module(*args)
        y: Tensor = module(*args) - wanted
        return y

    return Setting(Counts(), call=call)


@situation("called through functional_call", "functional_call|first", ways=("plan", "wrap"))
def _() -> Setting:
    model = Net()

    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        halved = {name: p * 0.5 for name, p in model.named_parameters()}
        y: Tensor = functional_call(module, halved, args)
        return y

    return Setting(model, call=call)


@situation("called in a context of its own", "DEPTH|depth|[Cc]ontext", ways=MODULE_WAYS)
def _() -> Setting:
    steps = [0]

    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        steps[0] += 1
        context = contextvars.copy_context()
        context.run(DEPTH.set, steps[0])
        y: Tensor = context.run(module, *args)
        return y

    return Setting(ByDepth(), call=call)


@situation("called by a module around it", "Around|inner", ways=MODULE_WAYS)
def _() -> Setting:
    class Around(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.outputs: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            self.outputs.append(y)
            return y * 2

    around: list[Any] = []

    def call(module: Any, args: tuple[Any, ...]) -> Tensor:
        if not around:
            around.append(Around(module))
        y: Tensor = around[0](*args)
        return y

    return Setting(
        Net(),
        lambda: [one.outputs for one in around],
        lambda y, t: mean_square(y, t) + around[0].outputs[-1].abs().mean(),
        call=call,
    )


@situation("the same tensor twice", "x|shift|input", exact=MODULE_WAYS)
def _() -> Setting:
    class Sums(Net):
        def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
            y: Tensor = super().forward(x + one * other)
            return y

    one = torch.linspace(0, 1, 6, requires_grad=True)
    return Setting(Sums(), lambda: [one, one.grad], inputs=lambda _: (one, one))


@situation("an argument is changed in place", "shift|input|in place", exact=("plan", "wrap"))
def _() -> Setting:
    class Changes(Net):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            shift.mul_(0.5).add_(1)
            y: Tensor = super().forward(x + shift)
            return y

    shift = torch.zeros(6)
    return Setting(Changes(), lambda: shift, inputs=lambda _: (shift,))


@situation("an argument is kept by the model", "kept|latest")
def _() -> Setting:
    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.latest: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.latest = x
            y: Tensor = super().forward(x)
            return y

    return Setting(Keeps())


@situation("an argument has an attribute of its own", "doubled", quick=True)
def _() -> Setting:
    class Reads(Net):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            y: Tensor = super().forward(x + shift)
            return y * 2 if getattr(shift, "doubled", False) else y

    def shift(step: int) -> tuple[Any, ...]:
        made: Any = torch.zeros(6)
        if step > 1:
            made.doubled = True
        return (made,)

    return Setting(Reads(), inputs=shift)

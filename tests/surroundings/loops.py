"""What a training loop changes between steps, and buffers that a forward changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.surroundings.situation import MODULE_WAYS, WAYS, Net, Setting, mean_square, situation

CALLS: list[Any] = []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.last(torch.tanh(self.first(x))))
        return y


@situation("weights are tied after a step", "first|last|tied")
def _() -> Setting:
    model = Tied()

    def after(step: int) -> None:
        if step == 0:
            model.last.weight = model.first.weight

    return Setting(model, after=after)


@situation("a module is replaced after a step", "last|head")
def _() -> Setting:
    model = Net()

    def after(step: int) -> None:
        if step == 0:
            with torch.random.fork_rng(devices=[]):
                model.last = nn.Linear(8, 3, bias=False)

    return Setting(model, after=after)


@situation("a float attribute is annealed", "temperature", exact=("wrap",), quick=True)
def _() -> Setting:
    class Annealed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def touch(self, h: Tensor) -> Tensor:
            return h / self.temperature

    model = Annealed()

    def before(step: int) -> None:
        model.temperature = 0.5**step

    return Setting(model, before=before)


@situation("a method is replaced after a step", "touch|forward|method|function")
def _() -> Setting:
    model = Net()
    return Setting(model, after=lambda _: setattr(model, "touch", torch.sin))


@situation("a parameter with an attribute of its own", "marked")
def _() -> Setting:
    class ByMark(Net):
        def touch(self, h: Tensor) -> Tensor:
            return h * self.first.weight.marked

    model = ByMark()
    model.first.weight.marked = 0.5  # type: ignore[attr-defined]

    def after(step: int) -> None:
        model.first.weight.marked = 0.5 ** (step + 2)  # type: ignore[attr-defined]

    return Setting(model, after=after)


@situation("a buffer that grows", "seen|buffer|size|shape")
def _() -> Setting:
    class Grows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0, 8))

        def touch(self, h: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, h.detach()])
            return h + self.seen.mean(0)

    return Setting(Grows())


@situation("a queue in a buffer", "queue|pointer", exact=("plan", "wrap"))
def _() -> Setting:
    class Queued(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(8, 8))

        def touch(self, h: Tensor) -> Tensor:
            h = h + (h @ self.queue.clone().t()).softmax(-1)
            self.queue.copy_(torch.cat([h.detach(), self.queue[:4]]))
            return h

    return Setting(Queued())


@situation("a buffer is bound anew", "mean", exact=("plan", "wrap"))
def _() -> Setting:
    class Binds(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def touch(self, h: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return h - self.mean

    return Setting(Binds())


@situation("a queue with an integer pointer", "pointer|ring")
def _() -> Setting:
    class Ring(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ring", torch.zeros(8, 8))
            self.pointer = 0

        def touch(self, h: Tensor) -> Tensor:
            self.ring[self.pointer : self.pointer + 4] = h.detach()
            self.pointer = (self.pointer + 4) % 8
            return h + self.ring.mean(0)

    return Setting(Ring())


@situation("gradients stay over micro-batches", "gradient", ways=MODULE_WAYS)
def _() -> Setting:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    return Setting(Net(), optimizer=lambda parameters: Keeping(parameters, 0.1))


@situation("gradients are zeroed before the backward", "gradient", ways=MODULE_WAYS)
def _() -> Setting:
    model = Net()
    return Setting(model, between=lambda _: model.zero_grad(set_to_none=False))


@situation("an output that the loss does not use", "output", ways=MODULE_WAYS, quick=True)
def _() -> Setting:
    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.first(x))
            return self.last(h), self.other(h)

    turn = [0]

    def loss(output: Any, target: Tensor) -> Tensor:
        return mean_square(output[turn[0] % 2], target)

    def after(step: int) -> None:
        turn[0] = step + 1

    return Setting(
        TwoHeads(), loss=loss, after=after, optimizer=lambda p: torch.optim.AdamW(p, 0.1)
    )


@situation("the data of a parameter is exchanged", "first|storage", exact=("plan", "wrap"))
def _() -> Setting:
    model = Net()

    def after(_step: int) -> None:
        model.first.weight.data = model.first.weight.data * 0.5

    return Setting(model, after=after)


@situation("a parameter is exchanged for another", "first|parameter")
def _() -> Setting:
    model = Net()

    def after(step: int) -> None:
        if step == 1:
            model.first.weight = nn.Parameter(torch.ones(8, 6))

    return Setting(model, after=after)


@situation("load_state_dict between steps", "state", exact=WAYS)
def _() -> Setting:
    model = Net()
    first = copy.deepcopy(model.state_dict())
    return Setting(model, after=lambda _: model.load_state_dict(first) and None)


@situation("a copy is taken between steps", "copy", ways=("wrap",), exact=("wrap",))
def _() -> Setting:
    model, copies = Net(), list[Any]()
    return Setting(
        model,
        lambda: [list(one.parameters()) for one in copies],
        after=lambda _: copies.append(copy.deepcopy(model)),
    )


@situation("a model with an attribute named calls", "calls", ways=("wrap",))
def _() -> Setting:
    class Calls(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def touch(self, h: Tensor) -> Tensor:
            self.calls.add_(1)
            return h * self.calls

    return Setting(Calls())


@situation(
    "the model is called twice in a step", "twice|call", ways=MODULE_WAYS, exact=("plan", "wrap")
)
def _() -> Setting:
    model = Net()
    modules: list[Any] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + modules[0](torch.ones(4, 6)).square().mean()

    def ready(module: Any) -> None:
        modules.append(module)

    return Setting(model, loss=loss, ready=ready)


@situation("a buffer that gets its size in the first forward", "lowest|buffer")
def _() -> Setting:
    class Observes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lowest", torch.tensor([]))

        def touch(self, h: Tensor) -> Tensor:
            low = h.detach().amin(0)
            if self.lowest.numel() == 0:
                self.lowest.resize_(8).copy_(low)
            else:
                self.lowest.copy_(torch.minimum(self.lowest, low))
            return h - self.lowest

    return Setting(Observes())


@situation(
    "a layer that gets its size in the first forward",
    "[Ll]azy|[Uu]ninitialized",
    torchs="Dynamo makes lazy parameters before it runs the model",
)
def _() -> Setting:
    model = Net()
    model.last = nn.LazyLinear(3)
    return Setting(model)


@situation("a learning rate in a closure", "rate|lr", exact=("plan", "wrap", "train_step"))
def _() -> Setting:
    used: list[float] = []
    schedulers: list[Any] = []

    def rate(step: int) -> float:
        used.append(0.5**step)
        return used[-1]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.Adam(parameters, 0.1)
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(made, rate))
        return made

    return Setting(
        Net(), lambda: used, optimizer=optimizer, after=lambda _: schedulers[-1].step() and None
    )

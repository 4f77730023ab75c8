"""Functions, classes and parametrizations that a model is made of, and what loops do to them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations, parametrize

from tests.surroundings.situation import MODULE_WAYS, WAYS, Net, Setting, mean_square, situation

CALLS: list[Any] = []


class Counting(torch.autograd.Function):
    """Writes down when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CALLS.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CALLS.append("backward")
        return gradient * 2


class WithCounting(Net):
    def touch(self, h: Tensor) -> Tensor:
        return Counting.apply(h)


@situation("a custom function counts its calls", "Counting|CALLS", quick=True)
def _() -> Setting:
    CALLS.clear()
    return Setting(WithCounting(), lambda: CALLS)


class Watched(torch.autograd.Function):
    """Lets the gradient through, and keeps it (a gradient's logger)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CALLS.append(gradient.detach().clone())
        return gradient


class WithWatched(Net):
    def touch(self, h: Tensor) -> Tensor:
        return Watched.apply(h)


@situation("a custom function keeps gradients", "Watched|CALLS")
def _() -> Setting:
    CALLS.clear()
    return Setting(WithWatched(), lambda: CALLS)


class Scale(torch.autograd.Function):
    """Scales the gradient by what its owner says in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.owner.scale, None


class WithScale(Net):
    scale = 1.0

    def touch(self, h: Tensor) -> Tensor:
        return Scale.apply(h, self)


@situation("a value changes between forward and backward", "scale", ways=MODULE_WAYS, quick=True)
def _() -> Setting:
    model = WithScale()

    def between(step: int) -> None:
        model.scale = 2.0 ** (step + 1)

    def before(_step: int) -> None:
        model.scale = 1.0

    return Setting(model, before=before, between=between)


@torch.library.custom_op("surroundings::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    CALLS.append("halve")
    return x * 0.5


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _halve_backward(_ctx: Any, gradient: Tensor) -> Tensor:
    CALLS.append("backward")
    return gradient * 0.5


halve.register_autograd(_halve_backward)


class Halves(Net):
    def touch(self, h: Tensor) -> Tensor:
        return halve(h)


@situation("a custom operator counts its calls", "halve|CALLS")
def _() -> Setting:
    # A plan may run an operator again: what it counts is its own business, its values are not.
    return Setting(Halves())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        CALLS.append("made")
        return weight.tanh()


@situation("a parametrization that counts", "CALLS")
def _() -> Setting:
    CALLS.clear()
    model = Net()
    parametrize.register_parametrization(model.last, "weight", Symmetric())
    CALLS.clear()
    return Setting(model, lambda: CALLS)


@situation("parametrize.cached around a step", "parametri|cache|weight")
def _() -> Setting:
    model = Net()
    parametrize.register_parametrization(model.last, "weight", Symmetric())
    return Setting(model, around=parametrize.cached)


@situation("spectral norm", "parametri|weight|spectral", exact=("plan", "wrap", "train_step"))
def _() -> Setting:
    model = Net()
    parametrizations.spectral_norm(model.last)
    return Setting(model)


@situation("old weight_norm", "weight_norm|weight|hook")
def _() -> Setting:
    model = Net()
    nn.utils.weight_norm(model.last)
    return Setting(model)


@situation("old spectral_norm", "spectral_norm|weight|hook")
def _() -> Setting:
    model = Net()
    nn.utils.spectral_norm(model.last)
    return Setting(model)


@situation("pruning", "prune|weight|hook|mask")
def _() -> Setting:
    from torch.nn.utils import prune

    model = Net()
    prune.random_unstructured(model.last, "weight", 0.5)
    return Setting(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.last(torch.tanh(self.first(x))))
        return y


@situation("weights are tied after a step", "first|last|tied|same|one")
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


@situation("a float attribute is annealed", "temperature", exact=("wrap", "backend"), quick=True)
def _() -> Setting:
    class Annealed(Net):
        temperature = 1.0

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


@situation("forward is replaced before planning", "forward", exact=("plan", "wrap", "train_step"))
def _() -> Setting:
    model = Net()
    whole = model.forward

    def forward(x: Tensor) -> Tensor:
        CALLS.append("forward")
        y: Tensor = whole(x) * 2
        return y

    CALLS.clear()
    model.forward = forward  # type: ignore[method-assign]
    return Setting(model)


class Functional(Net):
    """Calls itself with other parameters."""

    def touch(self, h: Tensor) -> Tensor:
        halved = {name: p * 0.5 for name, p in self.last.named_parameters()}
        y: Tensor = functional_call(self.last, halved, (h,))
        return h + y.mean()


@situation("functional_call in the forward", "functional_call|last")
def _() -> Setting:
    return Setting(Functional())


class Mapped(Net):
    def touch(self, h: Tensor) -> Tensor:
        y: Tensor = vmap(lambda row: row * row.sum())(h)
        return y


@situation("vmap in the forward", "vmap")
def _() -> Setting:
    return Setting(Mapped())


class Marked(Tensor):
    """A subclass that keeps a name, and says so of each function."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        CALLS.append("called")
        return super().__torch_function__(function, types, args, kwargs or {})


@situation("a tensor subclass as argument", "Marked|subclass", quick=True)
def _() -> Setting:
    class Shifted(Net):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    CALLS.clear()
    shift = torch.ones(6).as_subclass(Marked)
    return Setting(Shifted(), lambda: CALLS, inputs=lambda _: (shift,))


class Special(nn.Parameter):
    """A parameter with something beside it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        CALLS.append("called")
        return super().__torch_function__(function, types, args, kwargs or {})


@situation("a parameter of a subclass", "Special|subclass")
def _() -> Setting:
    CALLS.clear()
    model = Net()
    model.last.weight = Special(model.last.weight.detach())
    return Setting(model, lambda: len(CALLS) > 0)


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


@situation("the model is called twice in a step", "twice|call", ways=MODULE_WAYS, exact=("plan", "wrap"))
def _() -> Setting:
    model = Net()
    modules: list[Any] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) + modules[0](torch.ones(4, 6)).square().mean()

    def ready(module: Any) -> None:
        modules.append(module)

    return Setting(model, loss=loss, ready=ready)


@situation("torch.jit.script inside", "script|ScriptFunction|jit")
def _() -> Setting:
    class Scripted(Net):
        def touch(self, h: Tensor) -> Tensor:
            return scripted(h)

    return Setting(Scripted())


def _tripled(x: Tensor) -> Tensor:
    return x * 3


scripted = torch.jit.script(_tripled)


class Undecided(Net):
    """Turns off the compiler for a part of itself."""

    @torch.compiler.disable
    def touch(self, h: Tensor) -> Tensor:
        CALLS.append("eager")
        return h.sin()


@situation("a part that the compiler must leave alone", "disable|touch|CALLS")
def _() -> Setting:
    CALLS.clear()
    return Setting(Undecided(), lambda: CALLS)


class AsksCompiler(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h.sin() if torch.compiler.is_compiling() else h.cos()


@situation("a forward that asks whether it is compiled", "is_compiling", ways=("plan", "wrap", "train_step"))
def _() -> Setting:
    return Setting(AsksCompiler())


class Delegates(nn.Module):
    """Finds its attributes elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        CALLS.append(name)
        return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


@situation("a __getattr__ that delegates and records", "__getattr__|CALLS|first|last")
def _() -> Setting:
    model = Delegates()
    CALLS.clear()
    return Setting(model, lambda: [name for name in CALLS if name in ("first", "last")])

"""Functions, operators, subclasses and parametrizations that a model is made of."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations, parametrize

from tests.surroundings.situation import MODULE_WAYS, Net, Setting, situation

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


@situation("a custom function counts its calls", "Counting|CALLS")
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
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def touch(self, h: Tensor) -> Tensor:
        return Scale.apply(h, self)


@situation(
    "a value changes between forward and backward",
    "scale",
    ways=MODULE_WAYS,
    quick=True,
    torchs="Dynamo traces the backward together with the forward",
)
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


@situation(
    "a tensor subclass as argument",
    "Marked|subclass",
    torchs="what comes before a graph has run when that is refused",
)
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


@situation(
    "a forward that asks whether it is compiled",
    "is_compiling",
    ways=("plan", "wrap", "train_step"),
)
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

"""Modes, flags and contexts: in the forward, and around a step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from tests.surroundings.situation import MODULE_WAYS, WAYS, Net, Setting, situation

SEEN: list[Any] = []
NUMPY = np.random.default_rng(0)
GENERATOR = torch.Generator()


class CastsInside(Net):
    def touch(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last.weight.t().mm(self.last.weight).mm(h.t()).t().float()


@situation("autocast in the forward", "autocast", exact=("plan", "wrap", "train_step"))
def _() -> Setting:
    return Setting(CastsInside())


@situation("autocast around a step", "autocast", exact=("wrap", "backend"))
def _() -> Setting:
    return Setting(Net(), around=lambda: torch.autocast("cpu", torch.bfloat16))


class Teaching(Net):
    """Compares with a teacher that follows its weights, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            wanted = self.teacher(x)
        h = self.first(x)
        y: Tensor = self.last(h) + (h - wanted).square().mean()
        return y


@situation("an EMA teacher follows in the forward", "teacher", exact=("plan", "wrap"))
def _() -> Setting:
    return Setting(Teaching())


class GradientsOff(Net):
    """Leaves gradients off."""

    def touch(self, h: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        z = h.sin()
        torch.set_grad_enabled(True)
        return h + z


@situation("set_grad_enabled in the forward", "set_grad_enabled|grad mode", exact=("plan", "wrap"))
def _() -> Setting:
    return Setting(GradientsOff())


class Inferring(Net):
    def touch(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            rate = h.abs().mean()
        return h * rate.clone()


@situation("inference_mode in the forward", "inference")
def _() -> Setting:
    return Setting(Inferring())


class DoublePrecision(Net):
    """Leaves another default dtype behind while it runs."""

    def touch(self, h: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        table = torch.linspace(0, 1, 8)
        torch.set_default_dtype(torch.float32)
        return h + table.float()


@situation("the default dtype is set in the forward", "dtype")
def _() -> Setting:
    return Setting(DoublePrecision())


class SetsFlag(Net):
    def touch(self, h: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return h.sin()


@situation("the forward turns on deterministic algorithms", "deterministic", quick=True)
def _() -> Setting:
    return Setting(SetsFlag())


@situation("deterministic algorithms after a step", "deterministic")
def _() -> Setting:
    return Setting(Net(), after=lambda _: torch.use_deterministic_algorithms(True))


class SetsThreads(Net):
    def touch(self, h: Tensor) -> Tensor:
        torch.set_num_threads(2)
        return h.sin()


@situation("the forward sets the number of threads", "set_num_threads|threads")
def _() -> Setting:
    return Setting(SetsThreads())


class Watching(TorchFunctionMode):
    """Counts torch's functions, and halves what one of them gives."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.tanh:
            SEEN.append("tanh")
            return result * 0.5
        return result


@situation(
    "a TorchFunctionMode around a step",
    "Watching|[Ff]unction ?[Mm]ode|mode\\b",
)
def _() -> Setting:
    SEEN.clear()
    return Setting(Net(), lambda: SEEN, around=Watching)


class Dispatched(TorchDispatchMode):
    """Counts operators, and halves what one of them gives."""

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.tanh.default:
            SEEN.append("tanh")
            return result * 0.5
        return result


@situation("a TorchDispatchMode around a step", "Dispatched|[Dd]ispatch|mode\\b", quick=True)
def _() -> Setting:
    SEEN.clear()
    return Setting(Net(), lambda: SEEN, around=Dispatched)


class ModeInside(Net):
    def touch(self, h: Tensor) -> Tensor:
        with Dispatched():
            return torch.tanh(h)


@situation("a TorchDispatchMode in the forward", "Dispatched|[Dd]ispatch|mode\\b|SEEN")
def _() -> Setting:
    SEEN.clear()
    return Setting(ModeInside(), lambda: SEEN)


@situation(
    "a FlopCounterMode around a step", "FlopCounter|ModuleTracker|[Dd]ispatch", ways=MODULE_WAYS
)
def _() -> Setting:
    from torch.utils.flop_counter import FlopCounterMode

    SEEN.clear()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        SEEN.append(counter.get_total_flops())

    return Setting(Net(), lambda: SEEN, around=around)


class Recorded(Net):
    def touch(self, h: Tensor) -> Tensor:
        with record_function("surroundings"):
            return h.sin()


@situation("record_function in the forward", "record_function", exact=WAYS)
def _() -> Setting:
    return Setting(Recorded())


# On a CPU nothing is planned inside of the caller's profile, which memopt's own would end.
@situation("torch.profiler around a step", "profiler", exact=("plan", "train_step"))
def _() -> Setting:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return Setting(Net(), around=lambda: torch.profiler.profile(activities=activities))


@situation("anomaly detection around a step", "anomaly")
def _() -> Setting:
    return Setting(Net(), around=torch.autograd.detect_anomaly)


class Warning_(Net):
    def touch(self, h: Tensor) -> Tensor:
        warnings.warn("surroundings: a warning of the model's", stacklevel=2)
        return h


@situation("a warning in the forward", "warn", says=True)
def _() -> Setting:
    return Setting(Warning_())


class TurnsModes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def touch(self, h: Tensor) -> Tensor:
        self.norm.eval()
        h = self.norm(h)
        self.norm.train()
        y: Tensor = self.norm(h)
        return y


@situation("the forward turns a module's mode", "norm|training")
def _() -> Setting:
    return Setting(TurnsModes())


class StaysInEval(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def touch(self, h: Tensor) -> Tensor:
        y: Tensor = self.drop(h)
        self.drop.eval()
        return y


@situation("the forward leaves a module in eval mode", "drop|training")
def _() -> Setting:
    return Setting(StaysInEval())


@situation("the model is in eval mode", "eval|training", ways=MODULE_WAYS)
def _() -> Setting:
    model = Net()
    model.eval()
    return Setting(model)


@situation("the mode is turned between steps", "training|eval")
def _() -> Setting:
    class Drops(Net):
        def touch(self, h: Tensor) -> Tensor:
            return nn.functional.dropout(h, 0.5, self.training)

    model = Drops()
    return Setting(model, before=lambda step: model.train(step != 1) and None)


class Freezing(Net):
    def touch(self, h: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        return h


@situation("the forward freezes parameters", "requires_grad|first")
def _() -> Setting:
    return Setting(Freezing())


@situation(
    "parameters are frozen between steps",
    r"requires_grad|first\.weight",
    exact=("wrap", "backend"),
)
def _() -> Setting:
    model = Net()
    return Setting(model, before=lambda step: model.first.requires_grad_(step != 1) and None)


class Differentiates(Net):
    def touch(self, h: Tensor) -> Tensor:
        inner = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.sin().sum(), inner)
        return h * slope


@situation("torch.autograd.grad in the forward", r"requires_grad_")
def _() -> Setting:
    return Setting(Differentiates())


class Timer:
    """A context that counts its entries."""

    def __enter__(self) -> None:
        SEEN.append("entered")

    def __exit__(self, *_: object) -> None:
        SEEN.append("left")


class Timed(Net):
    timer = Timer()

    def touch(self, h: Tensor) -> Tensor:
        with self.timer:
            return h.sin()


@situation("a context manager of the user's", "SEEN|Timer|timer")
def _() -> Setting:
    SEEN.clear()
    return Setting(Timed(), lambda: SEEN)


@situation("a default device around a step", "device")
def _() -> Setting:
    class Makes(Net):
        def touch(self, h: Tensor) -> Tensor:
            return h + torch.ones(8)

    return Setting(Makes(), around=lambda: torch.device("cpu"))

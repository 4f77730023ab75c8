"""The options of `memopt.plan`, `wrap`, `compare`, `fits` and `profile` as a few records: the step,
its pricing, the limits, and the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from memopt.models.budget import WrittenBudget
from memopt.models.device import Device
from memopt.models.step_rules import PLAIN, StepRules

Mode: TypeAlias = Literal["measure", "estimate"]
Returns: TypeAlias = Literal["all", "loss"]
Mismatch: TypeAlias = Literal["plan", "original", "error"]
MISMATCHES: tuple[Mismatch, ...] = ("plan", "original", "error")


@dataclass(frozen=True)
class StepOptions:
    """The step to plan; the arguments of `memopt.plan` of these names.

    Attributes:
        whole_step: whether updates are planned, too; None: where that can be done.
        rules: micro-batches, clipping and scaling of a whole step.
    """

    loss_fn: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    optimizer: Any = None
    whole_step: bool | None = None
    offload_optimizer: bool = False
    movable: str | tuple[str, ...] = ()
    steady_state: bool = False
    accumulate: bool = False
    rules: StepRules = PLAIN
    returns: Returns = "all"

    def __post_init__(self) -> None:
        check_flags(
            offload_optimizer=self.offload_optimizer,
            steady_state=self.steady_state,
            accumulate=self.accumulate,
        )
        if self.whole_step is not None:
            check_flags(whole_step=self.whole_step)


@dataclass(frozen=True)
class Pricing:
    """How a step is captured and priced; the arguments of `memopt.plan` of these names."""

    device: Device | str | None = None
    mode: Mode = "measure"
    kernels: str = "aten"
    cache: bool = True

    def __post_init__(self) -> None:
        check_flags(cache=self.cache)
        place = isinstance(self.device, str) and self.device.partition(":")[0] in ("cpu", "cuda")
        if place or not isinstance(self.device, Device | str | None):
            raise ValueError(
                'device= is the name of a preset ("H100" say) or a memopt.Device, got '
                f"{self.device!r}: leave it out to plan for the device that the model is on"
            )


@dataclass(frozen=True)
class PlanLimits:
    """The limits of a plan and of the search for it; the arguments of `memopt.plan` of these
    names."""

    budget: WrittenBudget = None
    host_budget: int | str | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class PassOptions:
    """The passes over a strategy's program; the arguments of `memopt.plan` of these names."""

    order: bool = False
    place: bool = False

    def __post_init__(self) -> None:
        check_flags(order=self.order, place=self.place)


def check_flags(**flags: object) -> None:
    """Check options that are switched on or off.

    Raises:
        ValueError: one is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}= is True or False, got {value!r}")


def several(given: Any) -> tuple[Any, ...]:
    """Return the values of an option that takes several; one may come by itself."""
    listed = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if listed else (given,)


def check_own_calls(improve: bool, most_plans: int, shapes: Iterable[Any]) -> None:
    """Check the options of models that plan their own calls.

    Raises:
        ValueError: one is of another kind; the message says of which kind it is.
    """
    check_flags(improve=improve)
    if type(most_plans) is not int or most_plans < 1:
        raise ValueError(f"most_plans= is a whole number, at least 1, got {most_plans!r}")
    one_alone = isinstance(shapes, str | Mapping) or hasattr(shapes, "shape")
    if one_alone or not isinstance(shapes, Iterable):
        raise ValueError(
            "shapes= is a list of example inputs, each as inputs of memopt.plan: "
            f"[inputs, others], got {type(shapes).__name__}"
        )


def parse_returns(returns: str) -> Returns:
    """Read a user's `returns=`.

    Raises:
        ValueError: it is neither "all" nor "loss".
    """
    if returns not in ("all", "loss"):
        raise ValueError(f'returns= is "all" or "loss", got {returns!r}')
    return "loss" if returns == "loss" else "all"


def parse_mismatch(on_mismatch: str) -> Mismatch:
    """Read a user's `on_mismatch=`.

    Raises:
        ValueError: it is none of `MISMATCHES`.
    """
    for known in MISMATCHES:
        if on_mismatch == known:
            return known
    choices = ", ".join(map(repr, MISMATCHES))
    raise ValueError(f"on_mismatch= is one of {choices}, got {on_mismatch!r}")

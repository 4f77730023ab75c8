"""The options of `memopt.plan`, `wrap`, `compare`, `fits` and `profile` as a few records: the step,
its pricing, the limits, and the passes."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Pricing:
    """How a step is captured and priced; the arguments of `memopt.plan` of these names."""

    device: Device | str | None = None
    mode: Mode = "measure"
    kernels: str = "aten"
    cache: bool = True


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

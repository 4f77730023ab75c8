"""Random training loops around `memopt.wrap`: what a loop does between, around and to a model.

A loop is a model, a budget and a list of actions, drawn from a seed. It runs twice: with the model
as it is, and with the model wrapped. Everything that it saw (losses, gradients, parameters,
buffers, what hooks were told, the random state) has to be the same bits. Loops of whose last bits
memopt warns are counted as refused.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import memopt
from tests.fuzz import loop_changes  # noqa: F401 - registers actions
from tests.fuzz.loop_actions import ACTIONS
from tests.fuzz.loop_models import MODELS, WIDTH
from tests.fuzz.loop_state import Loop
from tests.sweeps.grammar import random_module
from tests.sweeps.modules import Found, sentence

OPTIONS: dict[str, Any] = {"cache": False, "progress": False, "time_limit_s": 0.5}
REMEDIES = 3
"""So many times a loop is refused at most: each refusal names a budget for what it has called."""
Seen = list[tuple[str, Any]]


def run(loop: Loop, actions: list[str]) -> Seen:
    """Run a loop's actions; return what it saw."""
    for step, name in enumerate(actions):
        begin(loop, step)
        loop.seen.append((f"step {loop.step} is {name}", None))
        ACTIONS[name](loop)
        loop.saw("random state", torch.get_rng_state())
    loop.look()
    return loop.seen


def begin(loop: Loop, step: int) -> None:
    """Begin a step of a loop, which draws the same whenever it runs."""
    loop.step, loop.dice = step, random.Random(f"{loop.seed} {step}")
    torch.manual_seed(1000 + step)
    numpy.random.seed(step)


@dataclass(frozen=True)
class Subject:
    """What a loop trains.

    Attributes:
        name: of the model; "random" is one of the grammar's.
        build: makes the model.
        inputs: the rows of a batch → the arguments of a call.
        context: what the forward runs in.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    context: Callable[[], AbstractContextManager[object]]


def subject(seed: int, dice: random.Random) -> Subject:
    """The subject of a seed."""
    if dice.random() < 0.5:
        made = random_module(seed, (3, 10))
        return Subject("random", made.build, lambda _: made.inputs(), made.context)
    name = dice.choice(sorted(MODELS))
    cast = dice.random() < 0.2
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if cast else nullcontext
    return Subject(name, MODELS[name], lambda rows: (torch.randn(rows, WIDTH),), context)


def drawn(seed: int) -> tuple[Subject, Any, list[str]]:
    """A seed's model, its budget ("min", none, or so many times the smallest) and its actions."""
    dice = random.Random(f"loop {seed}")
    trained = subject(seed, dice)
    share = dice.choice(("min", "min", None, 1.15, 1.5))
    return trained, share, ["plain", *dice.choices(sorted(ACTIONS), k=dice.randint(5, 14)), "plain"]


def fuzz_loop(seed: int) -> Found:
    """A seed's loop with the model as it is and wrapped; what differs."""
    found, (trained, share, actions) = Found(seed), drawn(seed)
    label = f"{trained.name} within {share}: {' '.join(actions)}"
    try:
        wanted = run(started(seed, trained, None), actions)
    except Exception as error:  # noqa: BLE001  # torch runs no such loop
        found.refused[f"without memopt: {sentence(error)}"] += 1
        return found
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            got = _planned(seed, trained, budget_of(share, trained), actions)
        except memopt.MemoptError as error:
            found.refused[sentence(error)] += 1
            return found
        except Exception as error:  # noqa: BLE001
            found.wrong.append((label, sentence(error)))
            return found
    found.cases = found.ran = 1
    found.by_strategy[trained.name] += 1
    difference = _difference(wanted, got)
    bits = [str(one.message) for one in told if "last bit" in str(one.message)]
    if difference is not None and bits:
        found.refused[f"warned: {bits[0][:80]}"] += 1
    elif difference is not None:
        found.wrong.append((label, difference))
    return found


def started(seed: int, trained: Subject, wrap: Callable[[nn.Module], nn.Module] | None) -> Loop:
    """A seed's loop before its first step."""
    torch.manual_seed(seed)
    model = trained.build().train()
    start = random.Random(f"start {seed}")
    loop = Loop(seed, model, trained.inputs, start, wrap, trained.context)
    if wrap is not None:
        wrap(model)
    return loop


def _planned(
    seed: int, trained: Subject, budget: Any, actions: list[str], remedies: int = REMEDIES
) -> Seen:
    """Run a seed's loop wrapped; one that is refused runs within the budget that is named."""
    loop = started(seed, trained, lambda one: memopt.wrap(one, budget, **OPTIONS))
    try:
        return run(loop, actions)
    except memopt.InfeasibleBudgetError as error:
        least = error.smallest_budget_bytes
        if least is None or not remedies or least <= error.budget_bytes:
            raise
    return _planned(seed, trained, least, actions, remedies - 1)


def budget_of(share: Any, trained: Subject) -> Any:
    """The budget that a seed draws."""
    if not isinstance(share, float):
        return share
    with trained.context():
        least = memopt.plan(trained.build(), trained.inputs(8), budget="min", **OPTIONS)
    return round(least.peak_bytes * share)


def _difference(wanted: Seen, got: Seen) -> str | None:
    """The first thing that the loops saw otherwise."""
    for (name, one), (other_name, other) in zip(wanted, got, strict=False):
        if name != other_name:
            return f"{name} is {other_name}"
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"{name} {one.shape} {one.dtype} is {other.shape} {other.dtype}"
            if not torch.equal(one.nan_to_num(), other.nan_to_num()):
                return f"{name} differs by {(one.double() - other.double()).abs().max():.3g}"
        elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
            return f"{name} {str(one)[:60]} is {str(other)[:60]}"
    if len(wanted) != len(got):
        return f"sees {len(got)} things, not {len(wanted)}"
    return None

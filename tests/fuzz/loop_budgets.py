"""Budgets in random training loops: what a step needs, once memopt has met it, is within the budget
or warned of.

A loop is that of the same seed in `tests.fuzz.loops`, with a budget of its own. Each of its steps
runs until memopt has met what lies around it, and once more, metered; what trains nothing runs
once. A step counts that ran under its plans alone: the original model is outside of the budget.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

import memopt
from tests.fuzz.loop_actions import ACTIONS
from tests.fuzz.loop_meter import LoopMeter
from tests.fuzz.loop_state import Loop
from tests.fuzz.loops import OPTIONS, Subject, begin, drawn, started
from tests.sweeps.modules import Found, sentence

MET = 4
"""Times that a step runs before it is metered."""
TRIES = 3
"""Times that it is to be metered, where memopt plans it again instead."""
WORDS = ("exceed their budget of", "often enough and stays")
"""Of the warnings that later steps do not keep a budget."""


@dataclass(frozen=True)
class Metered:
    """A metered step.

    Attributes:
        action: its place in the loop, and its name.
        over_bytes: of its peak above the budget.
        budget_bytes: the budget; of "min", that of its plans.
        told: memopt's warnings so far that budgets are not kept.
    """

    action: str
    over_bytes: int
    budget_bytes: int
    told: tuple[str, ...]

    @property
    def text(self) -> str:
        """What exceeds, for people."""
        return f"{self.action}: {self.over_bytes} bytes above {self.budget_bytes}"


def fuzz_budgets(seed: int) -> Found:
    """A seed's loop within a budget; which steps exceed it, and were not warned of."""
    found, (trained, _, actions) = Found(seed), drawn(seed)
    label = f"{trained.name}: {' '.join(actions)}"
    try:
        budget = budget_of(seed, trained)
        label = f"within {budget}, {label}"
        for one in metered(seed, trained, budget, actions):
            found.ran += 1
            if one.over_bytes > 0 and one.told:
                found.refused[f"warned: {one.told[0][:80]}"] += 1
            elif one.over_bytes > 0:
                found.wrong.append((label, one.text))
    except memopt.MemoptError as error:
        found.refused[sentence(error)] += 1
    except Exception as error:  # noqa: BLE001  # as in `tests.fuzz.loops`, which looks into it
        found.refused[f"fails: {sentence(error)}"] += 1
    found.cases = int(found.ran > 0)
    found.by_strategy[trained.name] += found.cases
    return found


def budget_of(seed: int, trained: Subject) -> Any:
    """A seed's budget: "min", or between the smallest plan's and what keeps everything."""
    dice = random.Random(f"budget {seed}")
    if dice.random() < 0.3:
        return "min"
    with warnings.catch_warnings(), trained.context():
        warnings.simplefilter("ignore")
        least, most = (
            memopt.plan(trained.build(), trained.inputs(8), budget=one, **OPTIONS).peak_bytes
            for one in ("min", None)
        )
    # What other kinds of steps need is seldom within the smallest.
    share = max(dice.random(), dice.random())
    return round(least + share * (most - least))


def metered(
    seed: int,
    trained: Subject,
    budget: Any,
    actions: list[str],
    wrap: Callable[..., nn.Module] = memopt.wrap,
) -> Iterator[Metered]:
    """Run a loop within a budget, each step until it has been met; meter it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop = started(seed, trained, lambda one: wrap(one, budget, **OPTIONS))
        meter = LoopMeter(loop)
        with meter.watching():
            for step, name in enumerate(actions):
                found = _settled(loop, step, name, meter)
                if found is None:
                    continue
                peak_bytes, budget_bytes = found
                if isinstance(budget, int):
                    budget_bytes = budget
                texts = dict.fromkeys(str(one.message) for one in told)
                said = tuple(text for text in texts if any(word in text for word in WORDS))
                yield Metered(f"{step} {name}", peak_bytes - budget_bytes, budget_bytes, said)


def _settled(loop: Loop, step: int, name: str, meter: LoopMeter) -> tuple[int, int] | None:
    """Run an action until its steps are met; its peak, and the budget of its plans."""
    loop.held.clear()  # what earlier actions hold is the loop's own
    for count in range(MET + TRIES):
        begin(loop, step)
        calls = memopt.running(loop.model).calls
        before = calls.planned
        meter.begin(metered=count >= MET)
        ACTIONS[name](loop)
        peak_bytes = meter.peak_bytes()
        if not meter.ran:
            return None
        budgets = [one.plan.budget for one in meter.ran if one.plan.budget is not None]
        planned = calls.planned - before == len(meter.ran)
        if peak_bytes is not None and meter.settled and planned and budgets:
            return peak_bytes, max(budgets)
    return None

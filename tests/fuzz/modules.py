"""Random modules x strategies x budgets: three planned steps are eager's, bit for bit, in memory.

A case is (module, strategy with its pass, budget). A module is captured once for all of its cases;
which strategies and budgets it meets is drawn from its seed. Beside memopt's strategies it runs
programs that are drawn at random, and sometimes whole train steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn

import memopt
from memopt.profiler import Profiled
from tests.fuzz.drawn import Drawn
from tests.sweeps.grammar import RandomModule, random_module
from tests.sweeps.modules import (
    PASSES,
    Cases,
    Found,
    compare,
    plan_or_refusal,
    sentence,
    sweep_module,
)

STRATEGIES_EACH, DRAWN_EACH, STEPS = 5, 3, 3
WHOLE_STEPS = 0.12
"""Share of the modules that are trained by a planned step, too."""
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
}


def fuzz_module(seed: int, limit_s: float = 1.0) -> Found:
    """All cases of a seed's module."""
    dice, made = drawn_module(seed)
    found = sweep_module(seed, made, drawn_cases(dice, made, limit_s))
    if found.operators and dice.random() < WHOLE_STEPS:
        _whole_step(dice, made, found)
    return found


def drawn_module(seed: int) -> tuple[Random, RandomModule]:
    """A seed's module, and what its cases are drawn with."""
    dice = Random(f"cases {seed}")
    return dice, random_module(seed, (4, 30) if dice.random() < 0.2 else (3, 14))


def drawn_cases(dice: Random, made: RandomModule, limit_s: float) -> Cases:
    """A few strategies at two budgets each, and drawn programs."""

    def cases(profiled: Profiled, found: Found) -> Iterator[tuple[str, memopt.Plan]]:
        for label, wanted in _wanted(dice, made.seed, profiled):
            possible = wanted.get("budget") == "min"
            with made.context():
                plan = plan_or_refusal(
                    profiled, found, label, possible=possible, time_limit_s=limit_s, **wanted
                )
            if plan is not None:
                yield label, plan

    return cases


def _wanted(dice: Random, seed: int, profiled: Profiled) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name → arguments of `memopt.plan`, of each case."""
    peak = profiled.baseline.peak_bytes
    least = profiled.graph.resident_bytes
    for name in dice.sample(sorted(memopt.strategies()), STRATEGIES_EACH):
        kind = dice.choice(list(PASSES))
        between = round(least + dice.uniform(0.4, 1.1) * max(0, peak - least))
        for budget in ("min", between):
            arguments = {"strategy": name, "budget": budget, **PASSES[kind]}
            yield f"{name} {budget} {kind}", arguments
    for number in range(DRAWN_EACH):
        drawn = Drawn(
            seed * DRAWN_EACH + number,
            recomputations=dice.randint(0, 8),
            swaps=dice.randint(0, 5),
            reorder=dice.random() < 0.5,
        )
        place = dice.random() < 0.4
        yield f"{drawn} {'placed' * place}", {"strategy": drawn, "place": place}


def _whole_step(dice: Random, made: RandomModule, found: Found) -> None:
    """Three planned train steps beside eager's."""
    name, strategy = dice.choice(list(OPTIMIZERS)), dice.choice(("rotor", "olla", "store-all"))
    label = f"whole step, {name}, {strategy}"
    model, twin = made.build(), made.build()
    loss_fn = made.loss
    optimizer, other = (OPTIMIZERS[name](one.parameters()) for one in (model, twin))
    try:
        with made.context():
            plan = memopt.plan(
                model, made.inputs(), loss_fn=loss_fn, optimizer=optimizer, strategy=strategy,
                budget=dice.choice((None, "min")), whole_step=True, cache=False, progress=False,
                time_limit_s=1.0,
            )  # fmt: skip
            step = plan.train_step(model, loss_fn, optimizer)
    except (memopt.MemoptError, ValueError) as error:
        found.refused[f"whole step: {sentence(error)}"] += 1
        return
    except Exception as error:  # noqa: BLE001
        found.wrong.append((label, sentence(error)))
        return
    found.cases += 1
    found.ran += 1
    found.by_strategy["whole step"] += 1
    try:
        for number in range(STEPS):
            torch.manual_seed(number)
            with made.context():
                loss = step(*made.inputs())
            after = torch.get_rng_state()
            torch.manual_seed(number)
            with made.context():
                wanted = made.loss(twin(*made.inputs()))
            wanted.backward()
            other.step()
            other.zero_grad()
            one = {"loss": loss, "random state": after, **_left(model, optimizer)}
            all_ = {"loss": wanted.detach(), "random state": torch.get_rng_state()}
            compare({**all_, **_left(twin, other)}, one, f"differs in step {number}", label, found)
    except Exception as error:  # noqa: BLE001
        found.wrong.append((label, f"step: {sentence(error)}"))


def _left(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, buffers and the optimizer's state, by name."""
    left: dict[str, Any] = {f"state {k}": v for k, v in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        left |= {f"optimizer {index} {key}": value for key, value in state.items()}
    return dict(sorted(left.items()))

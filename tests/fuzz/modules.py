"""Random modules x strategies x budgets: three planned steps are eager's, bit for bit, in memory.

A case is (module, strategy with its pass, budget). A module is captured once for all of its cases;
which strategies and budgets it meets is drawn from its seed. Beside memopt's strategies it runs
programs that are drawn at random, and sometimes whole train steps.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn

import memopt
from memopt.profiler import Profiled
from memopt.profiler.baseline import clear_gradients
from tests.fuzz.drawn import Drawn
from tests.sweeps.grammar import RandomModule, random_module
from tests.sweeps.modules import (
    PASSES,
    Found,
    compare,
    owned,
    profiled_quickly,
    run_one,
    sentence,
    train,
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


@dataclass
class Row:
    """What one module showed, a line of the results.

    Attributes:
        seed: of the module.
        cases: (module, strategy, budget) that were planned.
        ran: those of them whose program no other case of the module had, and that so were run.
        by_strategy: strategy → cases.
        operators: of the captured graph.
        refused: what memopt refuses on purpose → how often.
        wrong: (case, what is wrong with it).
    """

    seed: int
    cases: int = 0
    ran: int = 0
    by_strategy: Counter[str] = field(default_factory=Counter)
    operators: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps(vars(self))


def fuzz_module(seed: int, limit_s: float = 1.0) -> Row:
    """All cases of a seed's module."""
    row, dice = Row(seed), Random(f"cases {seed}")
    made = random_module(seed, (4, 30) if dice.random() < 0.2 else (3, 14))
    model, inputs = made.build(), made.inputs()
    before = owned(model, inputs)
    found = Found()
    try:
        profiled = profiled_quickly(made, model, inputs)
    except memopt.MemoptError as error:
        row.refused[sentence(error)] += 1
        return row
    except Exception as error:  # noqa: BLE001  # a crash is what is looked for
        row.wrong.append(("profile", sentence(error)))
        return row
    compare(before, owned(model, inputs), "changed by planning", "profile", found)
    row.operators = len(profiled.graph.operators)
    _run_cases(row, dice, made, model, profiled, found, limit_s)
    torch.set_rng_state(before["random state"])
    compare(before, owned(model, inputs), "changed by planning", "all cases", found)
    if dice.random() < WHOLE_STEPS:
        _whole_step(row, dice, made, found)
    row.wrong += found.wrong
    return row


def _run_cases(
    row: Row,
    dice: Random,
    made: RandomModule,
    model: nn.Module,
    profiled: Profiled,
    found: Found,
    limit_s: float,
) -> None:
    start = copy.deepcopy(model.state_dict())
    expected = train(copy.deepcopy(model), None, made, STEPS)
    known: set[str] = set()
    for label, wanted in _wanted(dice, row.seed, profiled):
        try:
            with made.context():
                plan = memopt.plan(profiled, time_limit_s=limit_s, progress=False, **wanted)
        except (memopt.MemoptError, ValueError) as error:
            _refusal(row, label, error)
            continue
        except Exception as error:  # noqa: BLE001
            row.wrong.append((label, sentence(error)))
            continue
        row.cases += 1
        row.by_strategy[plan.strategy.name] += 1
        key = repr((plan.program, plan.budget))
        if key in known:
            continue
        known.add(key)
        row.ran += 1
        try:
            run_one(plan, label, model, start, made, expected, STEPS, found)
        except Exception as error:  # noqa: BLE001
            found.wrong.append((label, f"step: {sentence(error)}"))
    model.load_state_dict(start)
    clear_gradients(model, [])


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


def _refusal(row: Row, label: str, error: Exception) -> None:
    """Counts what is refused with words; a budget between may be too small, "min" never."""
    infeasible = isinstance(error, memopt.InfeasibleBudgetError)
    impossible = isinstance(error, ValueError) and "cannot plan this model" not in str(error)
    if (infeasible and " min " in label) or impossible:
        row.wrong.append((label, sentence(error)))
    else:
        kind = "the budget is too small" if infeasible else sentence(error)
        row.refused[f"{label.split()[0]}: {kind}"] += 1


def _whole_step(row: Row, dice: Random, made: RandomModule, found: Found) -> None:
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
        row.refused[f"whole step: {sentence(error)}"] += 1
        return
    except Exception as error:  # noqa: BLE001
        row.wrong.append((label, sentence(error)))
        return
    row.cases += 1
    row.ran += 1
    row.by_strategy["whole step"] += 1
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

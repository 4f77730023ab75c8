"""Every strategy at tiny cost models with extreme figures, against exhaustive search.

Times from 1e-320 s to 1e13 s and sizes to 2^46 bytes in one model, links of 1e-9 to 1e300 bytes/s.
A plan is valid, its bound no larger than the optimum of its class, "optimal" is optimal, "min" is
not undercut by a byte and is planned again with and without `order=`, and no budget is no slower
than one. Whatever else is raised but memopt's own errors is wrong, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import memopt
from memopt.errors import MemoptError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain
from memopt.models.status import Status
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import Strategy
from memopt.strategies.base import CostModel
from memopt.strategies.target import Target
from tests.brute_force.sweep import Optimum, chain_optima, graph_optima, strategies
from tests.brute_force.tiny_graphs import tiny_graph
from tests.fuzz.instances import remembered, with_figures
from tests.fuzz.plans import Row

DECADES = ((-12, 6), (-30, 12), (-300, -290), (-18, -6), (0, 13), (-3, 3), (-320, 13))
DOUBLINGS = ((0, 4), (0, 44), (40, 46), (0, 20))
DEVICES = (
    Device(to_host_bytes_per_s=1e-9),
    Device(to_host_bytes_per_s=5.0),
    Device(to_host_bytes_per_s=1e300),
    Device(),
    Device(to_host_bytes_per_s=1e9, transfer_latency_s=1e14),
)
LIMIT_S = 60.0
"""Seconds for a plan: enough on a loaded machine, where a search cut short finds less."""
EXACT, PROVED = 1e-12, 1.01e-6
"""Relative errors of a sum of times, and of what a solver calls optimal."""


def extreme(seed: int) -> tuple[CostModel, Device]:
    """The cost model and the device of a seed."""
    dice = Random(f"ext {seed}")
    base: CostModel
    if dice.random() < 0.4:
        base = random_chain(dice, dice.randint(1, 5), parameter_gradients=dice.random() < 0.5)
    else:
        base = tiny_graph(dice)
    decades, doublings = dice.choice(DECADES), dice.choice(DOUBLINGS)
    model = with_figures(
        base,
        time=remembered(lambda _: 10 ** dice.uniform(*decades)),
        size=remembered(lambda _: 2 ** dice.randint(*doublings) + dice.randint(0, 3)),
    )
    return model, dice.choice(DEVICES)


@dataclass
class Asked:
    """One strategy at one cost model; `wrong` takes what is."""

    model: CostModel
    device: Device
    strategy: Strategy
    optimum: Optimum | None
    row: Row

    def plan(self, budget: int | str | None, *, order: bool = False) -> memopt.Plan | None:
        """A plan that is right; None: refused."""
        try:
            made = memopt.plan(
                self.model,
                budget=budget,
                strategy=self.strategy,
                device=self.device,
                order=order,
                time_limit_s=LIMIT_S,
                progress=False,
            )
        except MemoptError:
            return None
        except Exception as error:  # noqa: BLE001  # a crash is what is looked for
            self.wrong(budget, f"{type(error).__name__}: {error}")
            return None
        self.row.cases += 1
        self.row.by_strategy[self.strategy.name] += 1
        violation, _ = validate_and_replay(
            made.graph, made.program, Budget(made.budget), self.device
        )
        least_s = made.step_time_s
        if self.optimum is not None and not order:
            least_s = self.optimum(2**60 if made.budget is None else made.budget)
        if violation is not None:
            self.wrong(budget, str(violation))
        if made.lower_bound_s > min(least_s, made.step_time_s) * (1 + EXACT):
            self.wrong(budget, f"a bound of {made.lower_bound_s} s above {least_s} s")
        if made.status is Status.OPTIMAL and made.step_time_s > least_s * (1 + PROVED):
            self.wrong(budget, f"optimal in {made.step_time_s} s, but {least_s} s are possible")
        return made

    def wrong(self, budget: object, what: str) -> None:
        """Note it."""
        self.row.wrong.append((f"{self.strategy.name} {budget}", what))

    def check(self) -> None:
        """All budgets."""
        least, free = self.plan("min"), self.plan(None)
        if least is None or free is None or least.budget is None:
            return self.wrong("min", "there is no plan")
        if least.budget > 1 and (lower := self.plan(least.budget - 1)) is not None:
            self.wrong("min", f"{least.budget} bytes, and {lower.peak_bytes} will do")
        for share in (0.3, 1.0):
            room = max(0, free.peak_bytes - least.budget)
            between = self.plan(least.budget + int(share * room))
            if between is None:
                self.wrong(share, 'no plan above "min"')
            elif between.step_time_s < free.step_time_s * (1 - EXACT):
                self.wrong(None, f"{free.step_time_s} s, within a budget {between.step_time_s} s")
        if isinstance(self.model, Chain):
            return None
        ordered = self.plan("min", order=True)
        if ordered is None or self.plan(ordered.peak_bytes, order=True) is None:
            self.wrong("min", "order=True refuses its own peak")
        return None


def fuzz_extremes(seed: int, names: tuple[str, ...] = ()) -> Row:
    """Every strategy at a seed's cost model; `names`: only those."""
    row, (model, device) = Row(seed), extreme(seed)
    optima = chain_optima(model) if isinstance(model, Chain) else graph_optima(model)
    for strategy in strategies():
        if names and strategy.name not in names:
            continue
        if Target.of(strategy, model).why_not() is None:
            # Those that move tensors may be faster than what is searched.
            optimum = None if strategy.features.offload else optima.get(strategy.name)
            Asked(model, device, strategy, optimum, row).check()
    return row

"""auto: never worse than a single strategy, validated, and honest about what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import pytest
import torch
from torch import nn

import memopt
from memopt.api.planning import solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.stage_map import has_updates
from memopt.strategies import (
    Auto,
    Olla,
    Progress,
    Rotor,
    Solution,
    Status,
    StoreAll,
    Strategy,
    resolve,
)
from memopt.strategies.auto.strategy import ORDER, SMALL
from memopt.strategies.base import CostModel
from tests.models.training_graphs import overwriting
from tests.plan.tiny import make, profiled

LINK = Device(to_host_bytes_per_s=2.0)
MEMBERS = ("store-all", "sequential", "revolve", "rotor", "rotor-optimal", "rotor-free", "olla")
OFFLOAD = ("greedy", "dynprog", "vdnn", "tflms")
SHARES = (0.3, 0.5, 0.7, 0.9, 1.0)


def single_plan(
    cost_model: Chain | Graph, budget: int, name: str, device: Device
) -> memopt.Plan | None:
    """The plan of one strategy; None if it has none here."""
    try:
        return solve(cost_model, budget, resolve(name), device=device)
    except InfeasibleBudgetError:
        return None


def check_minimum(
    cost_model: Chain | Graph, names: tuple[str, ...], device: Device, rounding: float = 0.0
) -> int:
    """auto over these strategies is their minimum, at every budget; how many have a plan.

    Times of models are measured: their sum in another order differs in the last bit (`rounding`, a
    share). Those of random graphs are whole numbers.
    """
    peak = solve(cost_model, None, StoreAll(), device=device).peak_bytes
    auto = Auto(tuple(resolve(name) for name in names))
    planned = 0
    for share in SHARES:
        budget = int(share * peak)
        if budget < 1:
            continue
        plans = [one for name in names if (one := single_plan(cost_model, budget, name, device))]
        if not plans:
            with pytest.raises(InfeasibleBudgetError):
                solve(cost_model, budget, auto, device=device)
            continue
        planned += 1
        made = solve(cost_model, budget, auto, device=device)
        fastest_s = min(plan.step_time_s for plan in plans)
        assert made.step_time_s == pytest.approx(fastest_s, rel=rounding, abs=0.0)
        assert made.peak_bytes <= budget
        assert made.lower_bound_s <= made.step_time_s
    return planned


@pytest.mark.parametrize("seed", range(3))
def test_is_the_minimum_on_whole_steps(seed: int) -> None:
    """Chain strategies take part where the step updates parameters, as they do on their own."""
    rng = Random(seed)
    planned = 0
    while planned < 8:
        graph = random_graph(rng, rng.randint(2, 6), updates=True)
        if has_updates(graph):
            planned += check_minimum(graph, ("sequential", "rotor", "olla"), Device())
    graph = next(one for one in _steps(rng) if has_updates(one))
    auto = Auto((Rotor(), resolve("sequential")))
    made = memopt.plan(graph, budget="min", strategy=auto, progress=False)
    assert made.stats["chosen"] in ("rotor", "sequential")
    assert not made.stats["refused"]


def _steps(rng: Random) -> Iterator[Graph]:
    while True:
        yield random_graph(rng, 3, updates=True)


@pytest.mark.parametrize("seed", range(6))
def test_is_the_minimum_on_chains(seed: int) -> None:
    chain = random_chain(Random(seed), 4 + seed, parameter_gradients=seed % 2 == 1)
    assert check_minimum(chain, MEMBERS[:-1], LINK) > 0


@pytest.mark.parametrize("seed", range(3))
def test_is_the_minimum_with_offloading(seed: int) -> None:
    chain = random_chain(Random(seed), 8)
    assert check_minimum(chain, (*MEMBERS[:4], *OFFLOAD), LINK) > 0


@pytest.mark.parametrize("seed", range(3))
def test_is_the_minimum_on_graphs(seed: int) -> None:
    graph = random_graph(Random(seed), 9)
    assert check_minimum(graph, MEMBERS, Device()) > 0


def test_names_no_more_than_another_order_needs() -> None:
    """In a graph that is not small, too."""
    rng = Random(1)
    graph = random_graph(rng, SMALL)
    named = Auto().solve(graph, 1)
    assert "olla" in [name for name, *_ in named.stats["tried"]]
    in_order = ORDER.solve(graph, 1).smallest_budget_bytes
    assert in_order is not None
    assert named.smallest_budget_bytes is not None
    assert named.smallest_budget_bytes <= in_order


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.slow), "convolutions"])
def test_is_the_minimum_on_models(name: str) -> None:
    one = profiled(make(name))
    assert check_minimum(one.graph, MEMBERS, Device(), rounding=1e-14) > 1
    made = memopt.plan(one, budget="min", strategy="auto", progress=False)
    smallest = []
    for member in MEMBERS:
        plan = memopt.plan(one, budget="min", strategy=member, progress=False)
        smallest.append(plan.peak_bytes)
    assert made.peak_bytes <= min(smallest)
    assert made.program is not None
    assert validate(one.graph, made.program, Budget(made.budget)) is None
    assert replay(one.graph, made.program).time_s == made.step_time_s


def test_says_what_it_did() -> None:
    chain = random_chain(Random(1), 7)
    peak = solve(chain, None, StoreAll(), device=Device()).peak_bytes
    free = solve(chain, None, Auto(), device=Device())
    assert free.stats["chosen"] == "store-all"
    assert free.status is Status.OPTIMAL
    assert "nothing runs twice" in str(free.stats["reason"])
    tight = solve(chain, int(0.6 * peak), Auto(), device=Device())
    tried = tight.stats["tried"]
    assert isinstance(tried, tuple)
    assert {line[0] for line in tried} >= {"store-all", "rotor"}
    assert str(tight.stats["reason"]).startswith(str(tight.stats["chosen"]))


def test_offloading_needs_a_known_link() -> None:
    names = {one.name for one in Auto().candidates(Device())}
    assert "rotor" in names
    assert not names & set(OFFLOAD)
    assert {one.name for one in Auto().candidates(LINK)} >= set(OFFLOAD)


@pytest.mark.parametrize("seed", range(12))
def test_computes_in_place_as_its_members_do(seed: int) -> None:
    graph = overwriting(Random(seed), random_graph(Random(seed), 8))
    members = (StoreAll(), Olla(), Olla(in_place=False, place=False), resolve("monet"))
    for member in members:
        alone = solve(graph, None, member, device=Device())
        made = solve(graph, None, Auto((member,)), device=Device())
        assert made.program == alone.program
        assert made.peak_bytes == alone.peak_bytes


@dataclass(frozen=True)
class Misbehaving(Strategy):
    """Fails, plans what is invalid, or is interrupted."""

    name: ClassVar[str] = "misbehaving"
    needs: ClassVar[str] = "chain"

    how: str = "fail"

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        if self.how == "fail":
            raise MemoryError("the table is too large")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        steps = StoreAll().solve(cost_model, None).steps
        assert steps is not None
        return Solution(Status.OPTIMAL, steps=steps[:-1], time_s=0.0)


@pytest.mark.parametrize(("how", "word"), [("fail", "too large"), ("invalid", "invalid plan")])
def test_survives_a_bad_member(how: str, word: str) -> None:
    chain = random_chain(Random(3), 6)
    made = solve(chain, None, Auto((Misbehaving(how), Rotor())), device=Device())
    assert made.stats["chosen"] == "rotor"
    tried = made.stats["tried"]
    assert isinstance(tried, tuple)
    assert word in tried[0][-1]


def test_an_interrupt_keeps_what_is_found() -> None:
    chain = random_chain(Random(3), 6)
    budget = solve(chain, "min", Rotor(), device=Device()).peak_bytes
    auto = Auto((Rotor(), Misbehaving("interrupt"), StoreAll()))
    made = solve(chain, budget, auto, device=Device())
    assert made.stats["chosen"] == "rotor"
    assert made.stats["not_tried"] == ("misbehaving", "store-all")
    with pytest.raises(MemoptError, match="time_limit_s"):
        solve(chain, budget, Auto((Misbehaving("interrupt"), Rotor())), device=Device())


def test_no_time_is_no_proof() -> None:
    chain = random_chain(Random(3), 6)
    solution = Auto().solve(chain, 1, time_limit_s=0.0)
    assert solution.status is Status.UNKNOWN
    assert solution.stats["tried"] == ()


@pytest.mark.parametrize("make_one", [lambda: Auto(time_limit_s=0.0), lambda: Auto((Auto(),))])
def test_refuses_nonsense(make_one: type[Auto]) -> None:
    with pytest.raises(ValueError, match="Auto"):
        make_one()


def test_a_whole_step_runs_as_the_loop() -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

    model, plain, x = network(), network(), torch.randn(8, 16)
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, plain)]
    auto = Auto((Rotor(), resolve("sequential")))
    made = memopt.plan(
        model,
        x,
        budget="min",
        strategy=auto,
        loss_fn=torch.sum,
        optimizer=optimizers[0],
        whole_step=True,
        progress=False,
    )
    step = made.train_step(model, torch.sum, optimizers[0])
    for _ in range(2):
        loss = torch.sum(plain(x))
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(x), loss)

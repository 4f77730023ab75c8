"""Steps with several random operators, under plans that would gain by drawing in another order or
by leaving some out: outputs, gradients and the generator are eager's, step after step."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.errors import PlanFileError
from memopt.models.graph import Graph
from memopt.profiler import Profiled, profile_model
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import computes, with_frees


class Noise(nn.Module):
    """Two wide dropouts, of which the later one is gone at once: it would rather run first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 256)
        self.b = nn.Linear(8, 256)
        self.c = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.a(x), 0.5)
        z = functional.dropout(self.b(x), 0.5).mean(1, keepdim=True)
        found: Tensor = self.c(h) * z
        return found


class Unread(nn.Module):
    """Draws for statistics that nobody uses, before and after those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.aside = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(layer(x).tanh(), 0.5)
            self.aside(x).mean()
        torch.randperm(5)
        return x


class Shift(nn.Module):
    """The gradient of a parameter is that of what it is added to, which the backward goes on
    with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.5) + self.shift
        found: Tensor = self.last(x.sigmoid() * x)
        return found


MODELS = {"noise": (Noise, 8), "unread": (Unread, 16), "shift": (Shift, 8)}
PLANS = [
    ("olla", None, {}),
    ("store-all", "min", {"order": True, "place": True}),
    ("rotor", "min", {"order": True}),
    ("rotor-menus", "min", {}),
    ("checkmate", "min", {}),
    ("monet", "min", {"order": True}),
    ("auto", "min", {}),
]


@cache
def case(name: str) -> tuple[nn.Module, Tensor, Profiled]:
    """A model, its input and its profile."""
    make, width = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, width)
    return model, x, profile_model(model, x)


def steps(run: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    """What two steps with a loss that draws leave behind."""
    torch.manual_seed(3)
    left: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        y = run(x)
        functional.dropout(y, 0.25).square().sum().backward()
        left += [y.detach(), torch.get_rng_state()]
        left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return left


def first_draws(graph: Graph, program: Program) -> list[int]:
    """Random operators in the order of their first runs."""
    runs = (x.op for x in program if isinstance(x, Compute))
    return list(dict.fromkeys(op for op in runs if graph.operators[op].random))


@pytest.mark.parametrize(("strategy", "budget", "passes"), PLANS, ids=[row[0] for row in PLANS])
@pytest.mark.parametrize("name", MODELS)
def test_draws_are_eagers(
    name: str, strategy: str, budget: str | None, passes: dict[str, bool]
) -> None:
    model, x, profiled = case(name)
    plan = memopt.plan(
        profiled, budget=budget, strategy=strategy, time_limit_s=2.0, progress=False, **passes
    )
    assert plan.graph is not None
    assert plan.program is not None
    drawing = [i for i, operator in enumerate(plan.graph.operators) if operator.random]
    assert first_draws(plan.graph, plan.program) == drawing
    for one, other in zip(steps(plan.apply(model), model, x), steps(model, model, x), strict=True):
        assert torch.equal(one, other)


def test_a_file_with_another_order_is_refused(tmp_path: Path) -> None:
    profiled = case("noise")[2]
    plan = memopt.plan(profiled, strategy="store-all", progress=False)
    graph = profiled.graph
    first, second = (i for i, operator in enumerate(graph.operators) if operator.random)
    order = list(range(len(graph.operators)))
    # The second branch, its product among it, before the first one's draw.
    order[first : second + 1] = [*order[first + 1 : second + 1], first]
    program = Program(with_frees(graph, computes(graph, order)))
    replace(plan, program=program).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="random operators do not run first in the graph's"):
        memopt.load(tmp_path / "plan.json")


def loss_of(y: Tensor) -> Tensor:
    """A loss that draws."""
    return functional.dropout(y, 0.25).square().mean()


@pytest.mark.parametrize("name", ["noise", "unread"])
def test_whole_steps_draw_as_eager(name: str) -> None:
    make, width = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, width)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, eager)]
    plan = memopt.plan(
        model, x, strategy="olla", loss_fn=loss_of, optimizer=optimizers[0], progress=False
    )
    step = plan.train_step(model, loss_of, optimizers[0])
    torch.manual_seed(5)
    losses = [step(x) for _ in range(3)]
    planned_state = torch.get_rng_state()
    torch.manual_seed(5)
    for planned_loss in losses:
        optimizers[1].zero_grad()
        loss = loss_of(eager(x))
        loss.backward()
        optimizers[1].step()
        assert torch.equal(loss, planned_loss)
    assert torch.equal(torch.get_rng_state(), planned_state)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)

"""Programs that choose implementations run, exactly, at the predicted memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memopt.executor.apply import runtime_of
from memopt.executor.arena import arena_layout
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.out_variants import for_placing
from memopt.kernels import FAMILIES, with_implementations
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.passes.passes import place_program
from memopt.pricing.measure import MeasureOptions
from memopt.pricing.memory import metered
from memopt.profiler.estimate import estimate_model
from memopt.profiler.session import profile_model
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, LossBoundary, Program
from memopt.programs.liveness import computes, with_frees
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.step.backend import backend_of
from memopt.step.profiled import Profiled

QUICK = MeasureOptions(cap_s=0.1, max_rounds=1)


class Cnn(nn.Module):
    """Every family that a small CNN can have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU6(),
            nn.Dropout(0.3),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(256, 10),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


class Block(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        x = self.norm(x + weights @ v)
        result: torch.Tensor = x + self.drop(self.down(torch.relu(self.up(x)).tanh()))
        return result


def cnn() -> tuple[nn.Module, torch.Tensor]:
    return Cnn(), torch.rand(4, 3, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Block(), Block()), torch.rand(2, 12, 16)


def choosing(graph: Graph, wanted: tuple[str, ...]) -> tuple[Program, set[str]]:
    """Every operator once, in the first of the wanted implementations it has."""
    steps = []
    used = set()
    for step in computes(graph, range(len(graph.operators))):
        if isinstance(step, Compute):
            names = [choice.name for choice in graph.operators[step.op].implementations]
            name = next((name for name in wanted if name in names), None)
            if name is not None:
                used.add(f"{graph.operators[step.op].target} {name}")
            step = Compute(step.op, (), name)
        steps.append(step)
    return Program(with_frees(graph, steps)), used


def three_steps(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Losses and parameters of three optimizer steps."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
    found += [p.detach().clone() for p in module.parameters()]
    found += [b.detach().clone() for b in module.buffers()]
    return found


def planned(profiled: Profiled, model: nn.Module, program: Program, interpreted: bool) -> nn.Module:
    captured = profiled.captured
    installed = install(captured, profiled.lowering, program, interpreted=interpreted)
    return PlannedModule(model, captured, runtime_of(captured), installed)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("make", [cnn, transformer])
def test_chosen_implementations_train_exactly(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], interpreted: bool
) -> None:
    torch.manual_seed(0)
    model, x = make()
    other = copy.deepcopy(model)
    profiled = with_implementations(
        profile_model(model, x, options=QUICK), exact_only=True, options=QUICK
    )
    seen: set[str] = set()
    expected = three_steps(other, x)
    start = copy.deepcopy(model.state_dict())
    for wanted in [("bitmask", "index8", "input"), ("output", "shape only"), ("input",)]:
        program, used = choosing(profiled.graph, wanted)
        seen |= used
        assert validate(profiled.graph, program) is None
        model.load_state_dict(start)
        found = three_steps(planned(profiled, model, program, interpreted), x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), wanted
    assert len(seen) >= (12 if make is cnn else 6), sorted(seen)


@pytest.mark.parametrize("make", [cnn, transformer])
def test_no_address_is_planned_that_its_kernel_cannot_write_to(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    model, x = make()
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    profiled = for_placing(profiled)
    for wanted in [("bitmask", "index8", "input"), ("output", "shape only"), ("input",)]:
        program, _ = place_program(profiled.graph, choosing(profiled.graph, wanted)[0])
        layout = arena_layout(profiled.lowering, program, torch.device("cpu"))
        assert layout is not None
        planned_at = {(position, tensor) for position, tensor, _ in program.offsets or ()}
        assert planned_at == layout.at.keys()


@pytest.mark.parametrize("make", [cnn, transformer])
def test_memory_is_as_replayed(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, x = make()
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    for wanted in [(), ("bitmask", "index8", "input"), ("output", "shape only")]:
        program, _ = choosing(profiled.graph, wanted)
        module = planned(profiled, model, program, False)

        def step(module: nn.Module = module) -> torch.Tensor:
            y: torch.Tensor = module(x)
            y.backward(torch.ones_like(y))
            return y

        model.zero_grad()
        step()
        model.zero_grad()
        with metered(torch.device("cpu")) as use:
            y = step()
        del y
        resident = profiled.graph.resident_bytes - backend_of("cpu").step_scalars_bytes
        predicted = replay(profiled.graph, program).peak_bytes
        assert abs(resident + use.peak_bytes - predicted) <= 0.01 * predicted, wanted


class Head(nn.Module):
    """A language model's head with its loss."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(500, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 500, bias=bias)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", ["chunked", "rows"])
@pytest.mark.parametrize("bias", [False, True])
def test_less_than_three_times_the_logits(name: str, bias: bool) -> None:
    """Chunked, they never exist whole; by rows, their gradient is written over them: exact."""
    torch.manual_seed(0)
    model = Head(bias)
    ids = torch.randint(0, 500, (4, 32))
    labels = torch.randint(0, 500, (4, 32))
    labels[0, :5] = -100
    inputs = (ids, labels)
    expected = _gradients(model, model, inputs)
    profiled = with_implementations(profile_model(model, inputs, options=QUICK), options=QUICK)
    graph = profiled.graph
    chosen = [o for o in graph.operators if name in {c.name for c in o.implementations}]
    skipped = {"nll_loss_backward"}
    if name == "chunked":
        assert len(chosen) == 3 + bias
        skipped |= {"mm", "addmm", "_log_softmax", "_log_softmax_backward_data"}
    steps = []
    for step in computes(graph, range(len(graph.operators))):
        if isinstance(step, Compute):
            operator = graph.operators[step.op]
            if operator in chosen:
                step = Compute(step.op, (), name)
            elif operator.target.split(".")[1] in skipped:
                continue
        steps.append(step)
    program = with_in_place(graph, Program(with_frees(graph, steps)))
    assert validate(graph, program) is None
    logits_bytes = 4 * 128 * 500
    whole, _ = choosing(graph, ())
    saved = replay(graph, whole).peak_bytes - replay(graph, program).peak_bytes
    assert saved > (2.5 if name == "chunked" else 1.5) * logits_bytes
    for interpreted in (False, True):
        found = _gradients(planned(profiled, model, program, interpreted), model, inputs)
        for a, b in zip(found, expected, strict=True):
            close = torch.allclose(a, b, rtol=1e-5, atol=1e-7)
            assert close if name == "chunked" else torch.equal(a, b)


def _gradients(
    module: nn.Module, model: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    model.zero_grad()
    loss = module(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_inexact_implementations_are_close_and_gradients_split() -> None:
    torch.manual_seed(0)
    model, x = cnn()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = _gradients(nn.Sequential(model, Square()), model, (x,))
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    graph = profiled.graph
    for wanted in [("split 2", "output", "statistics"), ("split 8", "input gradient")]:
        steps = []
        for step in computes(graph, range(len(graph.operators))):
            if isinstance(step, Compute):
                names = [choice.name for choice in graph.operators[step.op].implementations]
                name = next((name for name in wanted if name in names), None)
                if name == "statistics":
                    name = None
                step = Compute(step.op, (), name)
                if name == "input gradient":
                    steps.append(Compute(step.op, (), "weight gradient"))
            steps.append(step)
        program = Program(with_frees(graph, steps))
        assert validate(graph, program) is None
        module = planned(profiled, model, program, False)
        found = _gradients(nn.Sequential(module, Square()), model, (x,))
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), wanted


class Square(nn.Module):
    """The loss."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()


def test_the_graph_is_unchanged_unless_asked() -> None:
    model, x = cnn()
    profiled = profile_model(model, x, options=QUICK)
    priced = with_implementations(profiled, options=QUICK)
    assert not any(o.implementations for o in profiled.graph.operators)
    assert priced.graph.tensors[: len(profiled.graph.tensors)] == profiled.graph.tensors
    assert len({name for name, _ in FAMILIES}) == len(FAMILIES)


def test_estimates_price_every_alternative() -> None:
    model, x = cnn()
    device = find_device("H100")
    profiled = with_implementations(estimate_model(model, x, device), device=device)
    named = {c.name: (c, o) for o in profiled.graph.operators for c in o.implementations}
    assert len(named) >= 8
    assert all(c.time_s > 0 for c, _ in named.values())
    # An algorithm is never taken to be faster than the library's choice, and that needs no
    # workspace here: none is better in anything, but those that write over what they read.
    every = [c for o in profiled.graph.operators for c in o.implementations]
    assert all(c.in_place for c in every if "split" in c.name)
    choice, operator = named["input gradient"]
    assert choice.time_s == pytest.approx(operator.time_s / 2)


@pytest.mark.parametrize("interpreted", [False, True])
def test_batch_norm_runs_again_by_its_known_statistics(interpreted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.rand(4, 3, 9, 9)
    other = copy.deepcopy(model)
    expected = _gradients(nn.Sequential(other, Square()), other, (x,))
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    graph = profiled.graph
    norm, relu = (
        next(i for i, o in enumerate(graph.operators) if f"aten.{name}." in o.target)
        for name in ("_native_batch_norm_legit_functional", "relu")
    )
    again = next(c for c in graph.operators[norm].implementations if c.name == "statistics")
    assert again.writes is not None
    assert again.writes < graph.operators[norm].writes or len(again.writes) == 1
    [activation] = graph.operators[relu].writes
    steps: list[Compute | LossBoundary] = []
    for step in computes(graph, range(len(graph.operators))):
        reads = graph.operators[step.op].reads if isinstance(step, Compute) else ()
        later = isinstance(step, Compute) and step.op >= graph.first_backward
        if later and activation in reads and steps.count(Compute(relu, ())) < 2:
            steps += [Compute(norm, again.writes, "statistics"), Compute(relu, ())]
        steps.append(step)
    program = Program(with_frees(graph, steps))
    assert validate(graph, program) is None
    assert sum(isinstance(s, Compute) and s.op == norm for s in program) == 2
    module = planned(profiled, model, program, interpreted)
    found = _gradients(nn.Sequential(module, Square()), model, (x,))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), "running statistics moved twice"


def test_packed_says_what_only_implementations_hold() -> None:
    model, x = cnn()
    profiled = profile_model(model, x, options=QUICK)
    own = len(profiled.graph.tensors)
    operators = with_implementations(profiled, options=QUICK).graph.operators
    choices = [choice for operator in operators for choice in operator.implementations]
    named = {choice.name for choice in choices if choice.packed}
    assert {"bitmask", "index8"} <= named
    for choice in choices:
        used = (*(choice.reads or ()), *(choice.writes or ()))
        assert choice.packed == any(tensor >= own for tensor in used)

"""Steps of models whose parameters and optimizer state do not fit into the budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor import homes
from memopt.executor.swap import ThreadSwap
from memopt.pricing import measure, updates
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of
from tests.whole_steps.test_failing_steps import Fault, FaultAt
from tests.whole_steps.test_train_step import assert_same

LOSS = nn.functional.cross_entropy
LINK = memopt.Device(to_host_bytes_per_s=5e9)
KERNEL_S, UPDATE_S = 1e-5, 1.35e-4
"""What each kernel and each update is said to take: measured ones give other plans."""


def layers(width: int = 64, depth: int = 5) -> nn.Module:
    torch.manual_seed(0)
    sizes = (64, *[width] * depth)
    hidden = [m for i in range(depth) for m in (nn.Linear(*sizes[i : i + 2]), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def lora(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(width) for _ in range(4)])


def batch(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    x = torch.randn(8, 64, generator=random)
    return x, torch.randint(0, 10, (8,), generator=random)


class Made:
    """A model with its planned step, and eager's twin."""

    def __init__(
        self,
        model: nn.Module,
        share: float,
        device: memopt.Device = LINK,
        host_budget: int | None = None,
        repeated: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.optimizer, self.eager = self.adamw(model), self.adamw(self.twin)
        self.bytes = sum(p.nbytes for p in model.parameters())
        self.trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        x, y = batch(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "_times", lambda missing, *_: [KERNEL_S] * len(missing))
            patch.setattr(updates, "timed", lambda *_: UPDATE_S)
            self.plan = memopt.plan(
                model,
                x,
                loss_fn=LOSS,
                targets=(y,),
                optimizer=self.optimizer,
                strategy="offload-graph",
                movable="all",
                steady_state=repeated,
                budget=int((self.bytes + 3 * self.trained) * share),
                device=device,
                host_budget=host_budget,
                cache=False,
                progress=False,
            )
        self.step = self.plan.train_step(model, LOSS, self.optimizer, **options)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def run(self, first: int, count: int) -> None:
        """Steps of both, and their losses' equality."""
        for number in range(first, first + count):
            x, y = batch(number)
            loss = self.step(x, targets=(y,))
            expected = LOSS(self.twin(x), y)
            expected.backward()
            self.eager.step()
            self.eager.zero_grad()
            assert torch.equal(loss, expected.detach()), number

    def assert_same(self) -> None:
        assert_same(self.model.state_dict(), self.twin.state_dict())
        assert_same(self.optimizer.state_dict(), self.eager.state_dict())

    def metered_peak(self, steps: int = 1) -> int:
        """As the plan counts it. What is there when the first step begins is not counted."""
        x, y = batch(7)
        with metered(torch.device("cpu")) as use:
            for _ in range(steps):
                self.step(x, targets=(y,))
        unmetered = self.plan.resident_bytes - backend_of("cpu").step_scalars_bytes
        return unmetered + use.peak_bytes


@pytest.mark.slow
def test_a_step_of_four_times_the_budget_equals_eager() -> None:
    made = Made(layers(192, 9), 0.25)
    assert 4 * made.bytes >= 4 * made.plan.budget
    made.run(0, 20)
    made.assert_same()
    assert made.step.host_bytes == made.plan.host_peak_bytes
    peak = made.metered_peak()
    assert peak <= made.plan.budget
    assert peak == pytest.approx(made.plan.peak_bytes, rel=0.005)


@pytest.mark.slow
def test_interpreted_steps_equal_eager() -> None:
    made = Made(layers(), 0.4, interpreted=True)
    made.run(0, 3)
    made.assert_same()


def test_a_frozen_base_travels_one_way() -> None:
    made = Made(lora(), 0.35)
    made.run(0, 4)
    made.assert_same()
    graph = made.plan.graph
    frozen = [t for t in graph.movable if "base" in graph.tensors[t].name]
    names = {type(x).__name__ for x in made.plan.program if getattr(x, "tensor", -1) in frozen}
    assert names == {"SwapIn", "Free"}
    assert made.step.host_bytes > made.bytes // 3
    assert made.metered_peak() == pytest.approx(made.plan.peak_bytes, rel=0.005)


def test_state_dicts_checkpoints_averages_and_evaluation() -> None:
    made = Made(layers(), 0.4)
    made.run(0, 2)
    saved = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
    average = torch.optim.swa_utils.AveragedModel(made.model)
    made.run(2, 2)
    made.model.load_state_dict(saved[0])
    made.optimizer.load_state_dict(saved[1])
    made.twin.load_state_dict(saved[0])
    made.eager.load_state_dict(copy.deepcopy(saved[1]))
    made.run(4, 2)
    made.assert_same()
    average.update_parameters(made.model)
    x, _ = batch(9)
    with made.step.parameters_on("cpu") as model, torch.no_grad():
        before = {name: p.data_ptr() for name, p in made.model.named_parameters()}
        assert torch.equal(model(x), made.twin(x))
        assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_plans_from_files_run(tmp_path: Path) -> None:
    made = Made(layers(64, 2), 0.8)
    made.plan.save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json")
    assert loaded.host_peak_bytes == made.plan.host_peak_bytes > 0
    assert loaded.resident_bytes == made.plan.resident_bytes
    made.step = loaded.train_step(made.model, LOSS, made.optimizer)
    made.run(0, 2)
    made.assert_same()


def everything(made: Made) -> Any:
    return copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("undo", [False, True])
def test_a_failing_operator_leaves_each_parameter_old_or_new(undo: bool) -> None:
    made = Made(layers(64, 2), 0.7, undo=undo)
    made.run(0, 1)
    before = everything(made)
    x, y = batch(1)
    made.step(x, targets=(y,))
    after = everything(made)
    names = [name for name, _ in made.model.named_parameters()]
    tensors = made.plan.graph.tensors
    moved = {tensors[t].name.removeprefix("model.") for t in made.step._homes.parameters}
    assert moved
    old = new = 0
    for number in range(1, 400, 7):
        made.model.load_state_dict(before[0])
        made.optimizer.load_state_dict(copy.deepcopy(before[1]))
        message = ""
        try:
            with FaultAt(number):
                made.step(x, targets=(y,))
        except (Fault, memopt.MemoptError) as error:
            message = str(error)
        if not message:
            break
        now = everything(made)
        for index, name in enumerate(names):
            if f"and {name} or its state perhaps in part" in message:
                assert name not in moved
                continue
            is_old = torch.equal(now[0][name], before[0][name])
            expected = before if is_old else after
            old, new = old + is_old, new + (not is_old)
            assert torch.equal(now[0][name], expected[0][name]), (number, name)
            assert_same(now[1]["state"][index], expected[1]["state"][index])
    assert old
    assert bool(new) != undo
    made.model.load_state_dict(before[0])
    made.optimizer.load_state_dict(before[1])
    made.run(1, 2)
    made.assert_same()


@pytest.mark.parametrize("undo", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("what", ["bring", "store", "wait"])
def test_a_failing_transfer(what: str, undo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(layers(64, 2), 0.7, undo=undo)
    made.run(0, 1)
    before = everything(made)
    x, y = batch(1)
    plain, calls = getattr(ThreadSwap, what), [0]

    def failing(self: ThreadSwap, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise Fault(what)
        return plain(self, *arguments)

    monkeypatch.setattr(ThreadSwap, what, failing)
    with pytest.raises((Fault, memopt.MemoptError)):
        made.step(x, targets=(y,))
    monkeypatch.undo()
    if undo:
        assert_same(everything(made)[0], before[0])
        assert_same(everything(made)[1]["state"], before[1]["state"])
    made.model.load_state_dict(before[0])
    made.optimizer.load_state_dict(before[1])
    made.run(1, 2)
    made.assert_same()


def test_a_failing_copy_of_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameter does not stay on the device."""
    made = Made(layers(64, 2), 0.7, undo=True)
    made.run(0, 1)
    x, y = batch(1)

    def failing(_: Any) -> bool:
        raise Fault("counter")

    monkeypatch.setattr(homes, "_is_counter", failing)
    with pytest.raises(Fault):
        made.step(x, targets=(y,))
    monkeypatch.undo()
    views = made.step._homes._views
    for tensor, parameter in made.step._homes.parameters.items():
        assert parameter.data_ptr() == views[tensor, ""].data_ptr()
    made.run(1, 2)
    made.assert_same()


def test_misuse_is_refused() -> None:
    model, (x, y) = layers(), batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    common = {"loss_fn": LOSS, "targets": (y,), "optimizer": optimizer, "progress": False}
    with pytest.raises(ValueError, match="moves no parameters"):
        memopt.plan(model, x, strategy="rotor", movable="all", **common)
    with pytest.raises(ValueError, match='movable= takes "parameters"'):
        memopt.plan(model, x, strategy="offload-graph", movable="everything", **common)
    with pytest.raises(ValueError, match="without offload_optimizer"):
        memopt.plan(
            model, x, strategy="offload-graph", movable="all", offload_optimizer=True, **common
        )


@pytest.mark.slow
def test_parameters_that_share_memory_stay() -> None:
    model = layers()
    model[2].weight = model[0].weight
    model[4].weight = nn.Parameter(model[6].weight.detach())
    made = Made(model, 0.9)
    names = {made.plan.graph.tensors[t].name for t in made.plan.graph.movable}
    assert "model.0.weight" in names
    assert not {"model.4.weight", "model.6.weight"} & names


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(8, 6, 2, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])


def test_joint_where_nothing_lives_on_the_host_between_steps() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    x, y = torch.randn(4, 5, 8), torch.randint(0, 5, (4,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = copy.deepcopy(model)
    plan = memopt.plan(
        model,
        x,
        loss_fn=LOSS,
        targets=(y,),
        optimizer=optimizer,
        strategy="joint",
        movable="gradients",
        budget=0.9,
        time_limit_s=1.0,
        progress=False,
    )
    plan.train_step(model, LOSS, optimizer)(x, targets=(y,))
    LOSS(expected(x), y).backward()
    torch.optim.AdamW(expected.parameters(), lr=0.01).step()
    assert_same(model.state_dict(), expected.state_dict())

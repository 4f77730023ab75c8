"""Nothing that a forward, a loss or their backward reach differs after planning's runs, and none
of the user's hooks has run."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.pricing.baseline import measure_baseline, measure_loss
from memopt.step.inputs import Call, to_call
from memopt.step.loss import Loss
from memopt.user_code.restored_state import state_restored
from tests.profiler import traces
from tests.profiler.traces import TRACES, Base

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TRACES)
def test_what_a_forward_reaches_is_put_back(name: str) -> None:
    touch, look = TRACES[name]
    model, x = Base(touch), torch.randn(2, 4)
    before = look(model)
    with state_restored(model, to_call(x)) as kept, kept.first_run():
        kept.backward([model(x).sum()])
        assert look(model) != before
    assert look(model) == before


@pytest.mark.parametrize("name", TRACES)
def test_planning_puts_back_what_a_forward_reaches(name: str) -> None:
    """Whether the model is planned or refused."""
    touch, look = TRACES[name]
    model, x = Base(touch), torch.randn(2, 4)
    before = look(model)
    with contextlib.suppress(memopt.CaptureError):
        memopt.plan(model, x, loss_fn=_mean, progress=False, cache=False)
    assert look(model) == before


class Follows(nn.Module):
    """A momentum encoder: its frozen weight is averaged in place, its queue is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.beside = torch.zeros(4)
        self.queue = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.5).add_(self.query.weight, alpha=0.5)
            self.beside.add_(1)
        found = self.query(x) * self.key(x) + self.queue + self.beside
        self.queue = self.queue * 0.5 + 1
        return found


def test_values_written_beside_an_assigned_buffer_are_put_back() -> None:
    model = Follows()
    before = [*map(Tensor.clone, model.state_dict().values()), model.beside.clone()]
    memopt.plan(model, torch.randn(2, 4), loss_fn=_mean, progress=False, cache=False)
    after = [*model.state_dict().values(), model.beside]
    assert all(map(torch.equal, before, after))


def test_objects_of_threads_are_left_alone() -> None:
    """What the code does not name, and what runs, is not put back."""

    class Reader(threading.Thread):
        read = 0

    reader, model = Reader(), Base(lambda model, _y: model.reader.read)
    model.reader, model.batch = reader, traces.Tracker()
    with state_restored(model, to_call(torch.randn(2, 4))):
        reader.read = 3
        model.batch.position = 5  # type: ignore[union-attr]
    assert reader.read == 3
    assert model.batch.position == 5  # type: ignore[union-attr]


def _hooked(told: list[Any]) -> tuple[nn.Module, Tensor, list[Any]]:
    """A model and an input with hooks of every kind on what a backward gives gradients to."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    first, second = model[0].weight, model[2].weight
    first.register_hook(lambda g: told.append("parameter"))
    second.register_post_accumulate_grad_hook(lambda p: told.append("accumulated"))
    x.register_hook(lambda g: told.append("input"))
    register_multi_grad_hook([first, second], lambda g: told.append("several"))
    register_multi_grad_hook([first, second], lambda g: told.append("any"), mode="any")
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in (first, second)]  # type: ignore[union-attr]
    nodes[0].register_hook(lambda *_: told.append("node"))
    nodes[1].register_prehook(lambda *_: told.append("before a node"))
    return model, x, nodes


_KINDS = {"parameter", "accumulated", "input", "several", "any", "node", "before a node"}


def _plan(model: nn.Module, x: Tensor) -> Any:
    return memopt.plan(model, x, loss_fn=_mean, budget="min", progress=False)


def _mean(output: Tensor) -> Tensor:
    return output.square().mean()


def _check(model: nn.Module, x: Tensor) -> None:
    _plan(model, x).check(model, x, loss_fn=_mean)


def _compare(model: nn.Module, x: Tensor) -> None:
    memopt.compare(model, x, strategies=["rotor"], budgets=[0.9], progress=False)


@pytest.mark.parametrize("run", [_check, _compare])
def test_no_gradient_hook_runs(run: Callable[..., None]) -> None:
    told: list[Any] = []
    model, x, nodes = _hooked(told)
    values = copy.deepcopy(model.state_dict())
    run(model, x)
    assert told == []
    assert all(p.grad is None for p in (*model.parameters(), x))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    _mean(model(x)).backward()
    assert set(told) == _KINDS
    assert len(nodes) == 2


def test_the_first_call_of_a_wrapped_model_runs_hooks_once() -> None:
    told: list[Any] = []
    model, x, _nodes = _hooked(told)
    _mean(model(x)).backward()
    once = sorted(told)
    told.clear()
    memopt.wrap(model, progress=False, cache=False)
    model.zero_grad()
    _mean(model(x)).backward()
    assert sorted(told) == once
    assert model.calls.planned == 1


def test_an_optimizer_in_the_backward() -> None:
    def trained(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        for p in model.parameters():
            optimizer = torch.optim.AdamW([p], 1e-2)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        if wrapped:
            memopt.wrap(model, progress=False, cache=False)
        for _ in range(2):
            _mean(model(torch.ones(3, 4))).backward()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_measured_where_nodes_are_held_is_what_is_measured_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    call, loss = to_call(torch.randn(32, 64)), Loss(_mean)
    free = measure_baseline(model, call, loss, CPU).peak_bytes
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    told: list[Any] = []
    nodes[0].register_hook(lambda *_: told.append(1))
    assert measure_baseline(model, call, loss, CPU).peak_bytes == free
    assert told == []


def test_a_reentrant_checkpoint_where_nodes_are_held() -> None:
    class Checkpointed(Base):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return y * self.scale

    model = Checkpointed(lambda *_: None)
    model.scale = nn.Parameter(torch.ones(4))
    node = model.scale.expand_as(model.scale).grad_fn
    x = torch.randn(2, 4, requires_grad=True)
    assert measure_baseline(model, to_call(x), Loss(_mean), CPU).peak_bytes > 0
    assert model.layer.weight.grad is None
    assert node is not None


def test_graphs_of_the_user_are_not_run() -> None:
    """Targets and what a loss holds may have been computed: their backward is still to come."""
    teacher, model = nn.Linear(4, 2), nn.Linear(4, 2)
    x = torch.randn(3, 4)
    target, weight = teacher(x).exp(), teacher(x).exp()
    told: list[Any] = []
    target.register_hook(lambda g: told.append(1))
    loss = Loss(lambda y, target: ((y - target) * weight).square().mean(), (target,))
    measure_baseline(model, to_call(x), loss, CPU)
    measure_loss(model, to_call(x), loss, CPU)
    assert told == []
    assert all(p.grad is None for p in (*teacher.parameters(), *model.parameters()))
    loss.value(model(x)).backward()
    assert teacher.weight.grad is not None


def test_hooks_on_all_modules_leave_no_trace() -> None:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        with state_restored(model, to_call(x)) as kept, kept.first_run():
            model(x)
            assert seen
        assert not seen
    finally:
        handle.remove()


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Looking(TorchFunctionMode):
    """Keeps what it sees of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_of_functions_leave_no_trace() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with Looking() as mode:
        memopt.plan(model, x, loss_fn=_mean, progress=False).check(model, x)
        assert mode.seen == []
        model(x)
        assert len(mode.seen) == 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_planning_is_outside_of_what_surrounds_it() -> None:
    model, x = Base(lambda *_: traces.CONTEXT.set(1)), torch.randn(2, 4)
    packed: list[Tensor] = []
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with (
        Counting() as mode,
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t), lambda _: None),  # type: ignore[arg-type]
        torch.autograd.detect_anomaly(check_nan=False),
    ):
        plan = memopt.plan(plain, x, loss_fn=_mean, budget="min", progress=False)
        plan.check(plain, x)
        with contextlib.suppress(memopt.CaptureError):
            memopt.plan(model, x, loss_fn=_mean, progress=False)
        assert packed == []
        assert mode.count == 0
        plain(x)
        assert packed
        assert mode.count
        assert torch.is_anomaly_enabled()
    with pytest.raises(LookupError):
        traces.CONTEXT.get()


def test_a_checkpoint_around_the_first_call() -> None:
    def gradient(wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        x = torch.randn(2, 4, requires_grad=True)
        if wrapped:
            memopt.wrap(model, progress=False, cache=False)
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(False), gradient(True))


@pytest.mark.parametrize("mode", ["measure", "estimate"])
def test_a_loss_leaves_no_trace(mode: Any) -> None:
    def loss(output: Tensor) -> Tensor:
        traces.AUX.append(output)
        traces.STATE.calls += 1
        return output.square().mean()

    model = nn.Linear(4, 4)
    memopt.plan(
        model, torch.randn(2, 4), loss_fn=loss, mode=mode, device="A100", progress=False
    )  # fmt: skip
    assert traces.AUX == []
    assert traces.STATE.calls == 0


def test_another_call_is_none_of_the_state() -> None:
    """A graph whose backward is still to come has it afterwards."""
    model = nn.Linear(4, 2)
    pending = _mean(model(torch.randn(2, 4)))
    told: list[int] = []
    model.weight.register_hook(lambda _: told.append(1))
    with state_restored(model, Call((torch.randn(2, 4),), {})) as kept, kept.first_run():
        kept.backward([_mean(model(torch.randn(2, 4)))])
    assert told == []
    pending.backward()
    assert told == [1]

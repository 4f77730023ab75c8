"""Forward and backward in unusual orders; what a step leaves behind when it fails."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from memopt.errors import ExecutionError
from memopt.pricing.memory import metered
from tests.executor.harness import PROGRAMS, Prepared, prepare


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.5)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.dropout(self.norm(self.a(x))).tanh())


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Keep what was imported out of the garbage collector's sight: its runs get fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    torch.manual_seed(0)
    return prepare(Model(), torch.randn(4, 6))


@pytest.fixture(params=list(PROGRAMS))
def planned(request: pytest.FixtureRequest, prepared: Prepared) -> nn.Module:
    prepared.model.zero_grad()
    return prepared.planned(request.param)


Gradients = dict[str, Tensor]


def gradients(model: nn.Module) -> Gradients:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(prepared: Prepared, planned: nn.Module, train: Callable[[nn.Module], None]) -> None:
    """`train` gives the same gradients and the same next random number through both modules."""
    results = []
    for module in (prepared.model, planned):
        torch.manual_seed(7)
        train(module)
        results.append((gradients(prepared.model), torch.rand(3)))
    (expected, draw), (found, other_draw) = results
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(draw, other_draw)
    assert prepared.waiting == 0


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_one_backward(prepared, planned, order) -> None:
    def train(module: nn.Module) -> None:
        losses = [module(batch(i)).square().sum() for i in range(2)]
        for i in order:
            losses[i].backward()

    same(prepared, planned, train)


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_backward_through_two_calls(program: str) -> None:
    def train(module: nn.Module) -> None:
        (
            module(module(batch(0).requires_grad_())) * module(batch(1).requires_grad_())
        ).sum().backward()

    own = prepare(Model(), batch(0).requires_grad_())
    same(own, own.planned(program), train)


def test_gradient_accumulation(prepared, planned) -> None:
    def train(module: nn.Module) -> None:
        for i in range(3):
            (module(batch(i)).square().mean() / 3).backward()

    same(prepared, planned, train)


def test_retained_graph_runs_again(prepared, planned) -> None:
    def train(module: nn.Module) -> None:
        loss = module(batch(0)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    same(prepared, planned, train)


def test_partial_gradients(prepared, planned) -> None:
    def train(module: nn.Module) -> None:
        (gradient,) = torch.autograd.grad(module(batch(0)).sum(), [prepared.model.a.weight])
        prepared.model.a.weight.grad = gradient

    same(prepared, planned, train)


def test_hooks_on_parameters(prepared, planned) -> None:
    calls: list[str] = []
    weight = prepared.model.a.weight
    hooks = [
        weight.register_hook(lambda g: (calls.append("tensor"), g * 2)[1]),
        weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated")),
    ]
    same(prepared, planned, lambda m: m(batch(0)).square().sum().backward())
    for hook in hooks:
        hook.remove()
    assert calls == ["tensor", "accumulated"] * 2


def test_hooks_on_the_planned_module_and_its_output(prepared, planned) -> None:
    calls: list[str] = []

    def train(module: nn.Module) -> None:
        handle = module.register_forward_hook(lambda *_: calls.append("forward"))
        y = module(batch(0))
        y.register_hook(lambda g: g * 3)
        y.sum().backward()
        handle.remove()

    same(prepared, planned, train)
    assert calls == ["forward"] * 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1),
    ],
    ids=["sgd", "adamw"],
)
def test_optimizer_loop(optimizer, prepared) -> None:
    start = copy.deepcopy(prepared.model.state_dict())
    states = []
    for module in (prepared.model, *(prepared.planned(name) for name in PROGRAMS)):
        prepared.model.load_state_dict(start)
        steps = optimizer(module.parameters())
        torch.manual_seed(3)
        for i in range(3):
            steps.zero_grad()
            module(batch(i)).square().mean().backward()
            steps.step()
        states.append(copy.deepcopy(prepared.model.state_dict()))
    prepared.model.load_state_dict(start)
    prepared.model.zero_grad()
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def test_backward_twice(prepared, planned) -> None:
    loss = planned(batch(0)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
        loss.backward()
    assert prepared.waiting == 0


def test_double_backward(prepared, planned) -> None:
    """The original runs for it; the step's state goes all the same."""
    parameters = list(prepared.model.parameters())

    def twice(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = module(batch(0)).sum()
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(g.square().sum() for g in found).backward()
        gradients = [p.grad for p in parameters]
        prepared.model.zero_grad()
        return [loss, *found, *gradients]

    expected = twice(prepared.model)
    with pytest.warns(UserWarning, match="create_graph=True"):
        results = twice(planned)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True) if a is not None)
    assert planned.calls.original == 1
    del results
    gc.collect()
    assert prepared.waiting == 0


def test_skipped_backward_drops_the_state(prepared, planned) -> None:
    y = planned(batch(0))
    assert prepared.waiting == 1
    del y
    gc.collect()
    assert prepared.waiting == 0


def test_no_state_without_gradients(prepared, planned) -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = planned(batch(0))
        assert not y.requires_grad
        assert prepared.waiting == 0


def test_no_grad_equals_the_original(prepared, planned) -> None:
    results = []
    for module in (prepared.model, planned):
        torch.manual_seed(5)
        with torch.no_grad():
            results.append(module(batch(0)))
    assert torch.equal(*results)


def test_eval_runs_the_original(prepared, planned) -> None:
    planned.eval()
    try:
        y = planned(batch(0))
        assert torch.equal(y, prepared.model(batch(0)))
        assert not prepared.model.training
        assert prepared.waiting == 0
        y.sum().backward()
    finally:
        planned.train()
    assert prepared.model.training


@pytest.mark.parametrize("program", PROGRAMS)
def test_changed_parameter(prepared, program) -> None:
    loss = prepared.planned(program)(batch(0)).sum()
    with torch.no_grad():
        prepared.model.b.weight.add_(1)
    with pytest.raises(ExecutionError, match=r"b\.weight was changed in place.*after backward"):
        loss.backward()
    del loss
    gc.collect()
    assert prepared.waiting == 0
    prepared.model.zero_grad()


def test_parameter_the_backward_does_not_read_may_change(prepared) -> None:
    loss = prepared.planned("store_all")(batch(0)).sum()
    with torch.no_grad():
        prepared.model.b.bias.add_(1)
    loss.backward()
    prepared.model.zero_grad()


class Fails(Exception):
    pass


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Fails


def left_behind(prepared: Prepared, step: Callable[[], None]) -> int:
    """Bytes that a failing step leaves on the device every time (autograd itself frees some of
    a failed backward's later, in unplanned models, too)."""
    left = []
    for _ in range(3):
        prepared.model.zero_grad()
        gc.collect()
        with metered(torch.device("cpu")) as use:
            step()
            prepared.model.zero_grad()
            gc.collect()
        left.append(use.end_bytes)
    return min(left)


def test_backward_that_fails_before_the_plan(prepared, planned) -> None:
    def step() -> None:
        loss = FailsInBackward.apply(planned(batch(0))).sum()
        with pytest.raises(Fails):
            loss.backward()

    assert left_behind(prepared, step) == 0
    assert prepared.waiting == 0


def test_backward_that_fails_after_the_plan(prepared, planned) -> None:
    def fail(_: Tensor) -> None:
        raise Fails

    def step(module: nn.Module) -> None:
        hook = prepared.model.norm.weight.register_hook(fail)
        with pytest.raises(Fails):
            module(batch(0)).sum().backward()
        hook.remove()

    # Autograd keeps gradients of a failed backward until the next one: those that it had yet to
    # take, which are fewer where all are computed before the first is taken.
    unplanned = left_behind(prepared, lambda: step(prepared.model))
    assert 0 < left_behind(prepared, lambda: step(planned)) <= unplanned
    assert prepared.waiting == 0
    same(prepared, planned, lambda m: m(batch(0)).sum().backward())


class CountingFailure(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails at the n-th kernel it sees."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.left = position

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not a user's mode, inside of which planned modules run unplanned."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise Fails
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("position", [2, 4, 6])
def test_kernel_that_fails_in_the_forward(prepared, planned, position) -> None:
    def step() -> None:
        before = torch.random.get_rng_state()
        with pytest.raises(Fails), CountingFailure(position):
            planned(batch(0))
        torch.random.set_rng_state(before)

    assert left_behind(prepared, step) == 0
    assert prepared.waiting == 0
    same(prepared, planned, lambda m: m(batch(0)).sum().backward())


@pytest.mark.parametrize("position", [1, 3, 6])
def test_kernel_that_fails_in_the_backward(prepared, planned, position) -> None:
    def step() -> None:
        loss = planned(batch(0)).sum()
        with pytest.raises(Fails), CountingFailure(position):
            loss.backward()

    assert left_behind(prepared, step) == 0
    assert prepared.waiting == 0
    same(prepared, planned, lambda m: m(batch(0)).sum().backward())


def test_failing_recomputation_restores_the_generator(prepared) -> None:
    for position in range(1, 12):
        loss = prepared.planned("recompute_late")(batch(0)).sum()
        before = torch.random.get_rng_state()
        with pytest.raises(Fails), CountingFailure(position):
            loss.backward()
        assert torch.equal(torch.random.get_rng_state(), before), position
    prepared.model.zero_grad()

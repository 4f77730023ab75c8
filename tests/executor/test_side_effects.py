"""What a forward leaves behind in Python objects: planned steps leave the same, or are refused."""

from __future__ import annotations

import collections
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError, GuardError
from memopt.executor.module import PlannedModule

LOSSES: list[Any] = []
FEATURES: dict[str, Tensor] = {}
QUEUE: collections.deque[Tensor] = collections.deque()
NAMES: set[str] = set()
KEPT: dict[str, Any] = {}
NUMBERS = itertools.count()
LAST: Tensor | None = None
COUNT = 0


class Tracker:
    """Of a class of the user's."""

    calls = 0
    latest: Any = None

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.mode = "eval"


TRACKER = Tracker()


class Net(nn.Module):
    def __init__(self, leave: Callable[[Net, Tensor, Any], Any]) -> None:
        super().__init__()
        self.gate, self.linear, self.leave = nn.Linear(3, 2), nn.Linear(3, 3), leave
        self.register_buffer("mean", torch.zeros(3))
        self.hidden: Any = None
        self.stored: list[Tensor] = []

    def forward(self, x: Tensor, batch: Any = None) -> Tensor:
        h = self.linear(x).tanh()
        self.leave(self, h, batch)
        return h * self.gate(x).softmax(-1).amax(-1, keepdim=True)


def last(_net: Net, h: Tensor, _: Any) -> None:
    global LAST
    LAST = h


def several(_net: Net, h: Tensor, _: Any) -> None:
    LOSSES.append(h.square().sum())
    LOSSES.append({"view": h[0], "name": "a", "number": 3})
    LOSSES.append(5)


def tried(net: Net, h: Tensor, _: Any) -> None:
    net.scratch = h.sum()
    net.hidden = net.scratch * 2
    del net.scratch


def cell() -> Callable[[Net, Tensor, Any], None]:
    kept: Any = None

    def leave(_net: Net, h: Tensor, _: Any) -> None:
        nonlocal kept
        kept = h.sum()

    return leave


def tracked(_net: Net, h: Tensor, _: Any) -> None:
    TRACKER.hidden, TRACKER.mode = h.detach() * 2, "train"


def own(net: Net, h: Tensor, _: Any) -> None:
    net.hidden = h
    net.stored.append(h.mean())


def assigned(net: Net, h: Tensor, _: Any) -> None:
    net.mean = net.mean * 0.9 + h.detach().mean(0)


def counted(_net: Net, _h: Tensor, _: Any) -> None:
    global COUNT
    COUNT += 1


LEAVES: dict[str, Callable[[Net, Tensor, Any], Any]] = {
    "a list": lambda net, h, _: LOSSES.append(h.square().sum()),
    "values of several kinds": several,
    "a dict": lambda net, h, _: FEATURES.update(a=h, b=h[:1]),
    "a deque": lambda net, h, _: QUEUE.append(h.detach()),
    "a set": lambda net, h, _: NAMES.add("called"),
    "a global": last,
    "a closure's variable": cell(),
    "an object's attributes": tracked,
    "a class's attribute": lambda net, h, _: setattr(Tracker, "latest", h),
    "the model's attributes": own,
    "an attribute that it deletes again": tried,
    "a buffer": assigned,
    "a count": counted,
    "a class's count": lambda net, h, _: setattr(Tracker, "calls", Tracker.calls + 1),
    "an argument that is a list": lambda net, h, batch: batch.append(h),
    "an argument's dict": lambda net, h, batch: batch[0].update(h=h, n=[h.sum()]),
    "an argument's item": lambda net, h, batch: batch[0].pop("gone"),
}


def reset() -> None:
    global LAST, COUNT
    COUNT, Tracker.calls = 0, 0
    for one in (LOSSES, FEATURES, QUEUE, NAMES, KEPT):
        one.clear()
    LAST, Tracker.latest = None, None
    TRACKER.__init__()  # type: ignore[misc]


def told(value: Any) -> Any:
    """A value as it can be compared: tensors bit for bit, and whether they have a gradient."""
    if isinstance(value, Tensor):
        return "tensor", value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return {key: told(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [told(one) for one in value]
    if isinstance(value, types.CellType):
        return told(value.cell_contents)
    return value


def world(net: Net, batch: Any) -> Any:
    cells = net.leave.__closure__ or ()
    own = {name: value for name, value in vars(net).items() if name in ("hidden", "stored")}
    buffers = dict(net.named_buffers())
    other = (
        LOSSES,
        FEATURES,
        QUEUE,
        NAMES,
        LAST,
        Tracker.latest,
        dict(vars(TRACKER)),
        COUNT,
        Tracker.calls,
    )
    return told((*other, Tracker.calls, own, buffers, batch, cells))


def found(value: Any) -> list[Tensor]:
    """The tensors with gradients in containers."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in found(one)] if isinstance(value, (list, tuple)) else []


def trained(net: Net, module: nn.Module) -> list[Any]:
    seen = []
    for step in range(3):
        reset()
        net.stored.clear()
        batch = [{"gone": torch.ones(2)}]
        x = torch.randn(4, 3, generator=torch.manual_seed(step))
        loss = module(x, batch).square().mean()
        for one in found([LOSSES, FEATURES, LAST, Tracker.latest, batch, net.hidden, net.stored]):
            loss = loss + one.square().sum() * 0.1
        loss.backward()
        gradients = [told(p.grad) for p in net.parameters()]
        seen.append((loss.item(), world(net, batch), gradients))
        net.zero_grad()
    return seen


def net_of(leave: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    reset()
    return Net(leave)


QUICK: dict[str, Any] = {"strategy": "rotor", "progress": False, "cache": False}


def planned(net: Net) -> PlannedModule:
    inputs = (torch.randn(4, 3), [{"gone": torch.ones(2)}])
    module: Any = memopt.plan(net, inputs, budget="min", **QUICK).apply(net)
    assert isinstance(module, PlannedModule)
    return module


@pytest.mark.parametrize("name", LEAVES)
def test_is_left_behind_as_in_eager(name: str) -> None:
    net = net_of(LEAVES[name])
    eager = trained(net, net)
    net = net_of(LEAVES[name])
    module = planned(net)
    assert trained(net, module) == eager
    assert module.calls.planned == 3


REFUSED: dict[str, tuple[Callable[[Net, Tensor, Any], Any], str]] = {
    "a text that grows": (
        lambda net, h, _: setattr(TRACKER, "mode", TRACKER.mode + "!"),
        r"TRACKER\.mode",
    ),
    "an iterator": (lambda net, h, _: FEATURES.update(a=h * next(NUMBERS)), r"NUMBERS"),
    "a hook on a parameter": (
        lambda net, h, _: net.linear.weight.register_hook(lambda g: 2 * g),
        r"a hook on model\.linear\.weight",
    ),
    "a tensor in a set": (lambda net, h, _: NAMES.add(h), r"NAMES"),
    "an argument's container moved": (
        lambda net, h, batch: batch.append(batch[0]),
        r"argument 1\b",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    leave, named = REFUSED[name]
    with pytest.raises(CaptureError, match=named):
        planned(net_of(leave))


def test_a_list_that_is_not_cleared_is_traced_again_and_warned_of() -> None:
    net = net_of(LEAVES["a list"])
    module = planned(net)
    reset()
    x = torch.randn(4, 3)
    message = r"LOSSES: planned \d+ items, got \d+.*Clear such lists"

    def ten_steps() -> None:
        for _ in range(10):
            module(x, [{"gone": torch.ones(2)}]).sum().backward()

    with pytest.warns(UserWarning, match=message):
        ten_steps()
    assert len(LOSSES) == module.calls.planned == 10


def test_a_list_that_is_another_object_each_time() -> None:
    net = net_of(lambda net, h, _: net.stored.append(h.sum()))
    module = planned(net)
    for step in range(2):
        net.stored = []
        module(torch.full((4, 3), float(step)), [{"gone": torch.ones(2)}])
        assert len(net.stored) == 1


def test_a_list_that_keeps_its_last_items() -> None:
    def leave(net: Net, h: Tensor, _: Any) -> None:
        net.stored.append(h.detach().mean())
        net.stored.pop(0)

    def three_steps(run: Callable[[Net], nn.Module]) -> Any:
        net = net_of(leave)
        net.stored = [torch.tensor(float(i)) for i in range(3)]
        module, seen = run(net), []
        for step in range(3):
            module(torch.full((4, 3), float(step)), [{"gone": torch.ones(2)}])
            seen.append(told(net.stored))
        return seen

    assert three_steps(planned) == three_steps(lambda net: net)


def test_a_flag_that_is_set_is_set_by_each_step() -> None:
    net = net_of(lambda net, h, _: setattr(TRACKER, "mode", "train"))
    module = planned(net)
    for _ in range(2):
        TRACKER.mode = "eval"
        module(torch.randn(4, 3), [{"gone": torch.ones(2)}])
        assert TRACKER.mode == "train"


def whole_step(net: Net, loss_fn: Callable[..., Tensor]) -> float:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4, 3, generator=torch.manual_seed(1))
    given = {"loss_fn": loss_fn, "optimizer": optimizer, "whole_step": True}
    plan = memopt.plan(net, x, progress=False, cache=False, **given)
    reset()
    return float(plan.train_step(net, loss_fn, optimizer)(x))


def test_a_train_step_whose_loss_takes_what_the_forward_left() -> None:
    def loss_fn(y: Tensor) -> Tensor:
        loss = y.square().mean() + sum(LOSSES)
        LOSSES.clear()
        return loss

    net = net_of(LEAVES["a list"])
    x = torch.randn(4, 3, generator=torch.manual_seed(1))
    want = loss_fn(net(x)).item()
    assert whole_step(net, loss_fn) == want
    assert not LOSSES


def test_a_train_step_that_would_leave_tensors_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"LOSSES.*clear it in loss_fn"):
        whole_step(net_of(LEAVES["a list"]), lambda y: y.square().mean())


def test_a_train_step_sets_flags() -> None:
    net = net_of(lambda net, h, _: setattr(TRACKER, "mode", "train"))
    whole_step(net, lambda y: y.square().mean())
    assert TRACKER.mode == "train"


@pytest.mark.parametrize("way", ["plan", "wrap"])
def test_a_loss_that_is_known_takes_what_the_forward_left(way: str) -> None:
    def loss_fn(y: Tensor) -> Tensor:
        return y.square().mean() + sum(LOSSES)

    def two_steps(module: nn.Module) -> list[Any]:
        seen = []
        for step in range(2):
            LOSSES.clear()
            loss = loss_fn(module(torch.randn(4, 3, generator=torch.manual_seed(step))))
            loss.backward()
            seen.append((loss.item(), [told(p.grad) for p in net.parameters()]))
            net.zero_grad()
        return seen

    net = net_of(LEAVES["a list"])
    eager = two_steps(net)
    net = net_of(LEAVES["a list"])
    options: dict[str, Any] = {"budget": "min", "loss_fn": loss_fn, "progress": False}
    module: Any = net
    if way == "plan":
        plan = memopt.plan(net, torch.randn(4, 3), **options)
        assert not LOSSES
        measured = plan.check(net).measured_peak_bytes
        assert plan.peak_bytes - 64 <= measured <= plan.peak_bytes
        module = plan.apply(net)
    else:
        memopt.wrap(net, **options)
    assert two_steps(module) == eager
    assert module.calls.planned == 2


def test_the_first_call_of_einops_is_no_side_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """einops looks for a class's library once, and keeps an object of its own in a global."""
    known: dict[type, object] = {}

    def rearrange(tensor: Tensor, pattern: str) -> Tensor:
        if type(tensor) not in known:
            known[type(tensor)] = Tracker()
        return tensor.flatten() if pattern == "a b -> (a b)" else tensor

    class Rearranged(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return rearrange(super().forward(x), "a b -> (a b)") + self.weight.sum()

    model, x = Rearranged(4, 4), torch.randn(2, 4)
    options: Any = {"strategy": "store-all", "progress": False}
    with pytest.raises(CaptureError, match="call the model once before planning"):
        memopt.plan(model, x, **options)
    monkeypatch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=rearrange))
    planned = memopt.plan(model, x, **options).apply(model)
    assert torch.equal(planned(x), model(x))


def test_a_plan_of_a_first_call_says_to_call_the_model_before() -> None:
    net = net_of(lambda net, h, _: hasattr(net, "kept") or net.register_buffer("kept", h.detach()))
    module = planned(net)
    inputs = torch.randn(4, 3), [{"gone": torch.ones(2)}]
    module(*inputs).sum().backward()
    with pytest.raises(GuardError, match=r"has 'kept'.*call the model once before planning"):
        module(*inputs)
    again = planned(net)
    again(*inputs)
    again(*inputs)
    assert again.calls.planned == 2

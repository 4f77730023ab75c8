"""What a forward reads beside its inputs is a constant of the planned graph: a changed one is
followed or refused, never ignored."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.capture.trace import traced_again
from memopt.errors import GuardError
from memopt.executor.module import PlannedModule
from memopt.step.dependencies import Dependencies
from tests.executor.harness import prepare

X = torch.randn(4, 6, generator=torch.manual_seed(0))
SCALE, TABLE = 2.0, {"inner": [1.0, 3.0]}


def scaled(x: Tensor, by: float = 0.5, *, more: float = 1.5) -> Tensor:
    return x * by * more * SCALE * TABLE["inner"][1]


def double(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def nothing(*_: Any) -> None:
    return None


class DropPath(nn.Module):
    """As timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.drop_prob) if self.drop_prob and self.training else x


class Inheriting(DropPath):
    pass


class Adapter(nn.Module):
    """Merged or not, as PEFT's."""

    factor = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(6, 6), nn.Linear(6, 6)
        self.merged_adapters: list[str] = []
        self.scaling = {"default": 2.0}

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) * self.factor
        return y if self.merged else y + self.low(x) * self.scaling["default"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = 0.3

        def closed(x: Tensor) -> Tensor:
            return x * weight

        def set_weight(value: float) -> None:
            nonlocal weight
            weight = value

        self.closed, self.set_weight = closed, set_weight
        self.beta, self.wide = 1.0, True
        self.config = SimpleNamespace(use_cache=False, size=SimpleNamespace(k=2))
        self.held, self.listed = torch.ones(6), [torch.ones(6), 1.25]
        self.part = functools.partial(scaled, by=0.75)
        self.drop, self.adapter = Inheriting(), Adapter()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.unlisted = [nn.Linear(6, 6)]
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x) + self.b(x)) * self.beta + self.held
        y = y.relu() if self.wide else y
        y = y + 1 if self.config.use_cache else y * self.config.size.k
        y = self.layers(self.adapter(y)) + self.listed[0] * self.listed[1]
        if hasattr(self, "extra"):
            y = y + self.extra
        return self.closed(y) + self.part(y) + scaled(y) + self.unlisted[0](y)


@pytest.fixture(scope="module")
def subject() -> PlannedModule:
    torch.manual_seed(0)
    model = Model()
    model.layers[0].register_forward_hook(double)
    return prepare(model, X).planned()


@pytest.fixture
def planned(subject: PlannedModule) -> Iterator[PlannedModule]:
    """A copy, to be damaged; globals and classes are put back."""
    table, defaults, forward = copy.deepcopy(TABLE), scaled.__defaults__, DropPath.forward
    yield copy.deepcopy(subject)
    subject.original.set_weight(0.3)  # which copies share
    TABLE.update(table)
    scaled.__defaults__, DropPath.forward = defaults, forward
    if "forward" in vars(Inheriting):
        del Inheriting.forward
    globals()["SCALE"], Adapter.factor = 2.0, 1.5
    nn.modules.module._global_forward_hooks.clear()


def gradients(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    output = module(X)
    output.square().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_as_original(planned: PlannedModule) -> None:
    for found, expected in zip(gradients(planned), gradients(planned.original), strict=True):
        assert torch.equal(found, expected)


def setting(**values: Any) -> Callable[[Any], None]:
    return lambda model: [setattr(model, k, v) for k, v in values.items()] and None


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (setting(beta=0.5), r"model\.beta: planned 1\.0, got 0\.5"),
    "nan": (setting(beta=float("nan")), r"model\.beta: planned 1\.0, got nan"),
    "flag": (setting(wide=False), r"model\.wide: planned True, got False"),
    "new attribute": (setting(extra=1.0), r"model has 'extra', and was planned without"),
    "config": (lambda m: setattr(m.config, "use_cache", True), r"model\.config\.use_cache"),
    "nested": (lambda m: setattr(m.config.size, "k", 3), r"config\.size\.k: planned 2, got 3"),
    "other config": (
        setting(config=SimpleNamespace(use_cache=True, size=SimpleNamespace(k=2))),
        r"model\.config\.use_cache: planned False, got True",
    ),
    "attribute gone": (
        lambda m: delattr(m.config, "use_cache"),
        r"model\.config\.use_cache: planned False, got nothing",
    ),
    "list": (lambda m: m.listed.__setitem__(1, 9.0), r"model\.listed\[1\]: planned 1\.25, got 9"),
    "drop_prob": (lambda m: setattr(m.drop, "drop_prob", 0.0), r"model\.drop\.drop_prob"),
    "merged": (
        lambda m: m.adapter.merged_adapters.append("default"),
        r"merged_adapters: planned 0",
    ),
    "scaling": (lambda m: m.adapter.scaling.update(default=4.0), r"adapter\.scaling\['default'\]"),
    "class attribute": (lambda m: setattr(Adapter, "factor", 9.0), r"factor: planned 1\.5, got 9"),
    "partial": (
        lambda m: m.part.keywords.update(by=9.0),
        r"model\.part\.keywords\['by'\]: planned 0\.75, got 9\.0",
    ),
    "closure": (lambda m: m.set_weight(0.9), r"model\.closed's weight: planned 0\.3, got 0\.9"),
    "global": (lambda m: globals().update(SCALE=9.0), r"SCALE: planned 2\.0, got 9\.0"),
    "in a global": (
        lambda m: TABLE["inner"].__setitem__(1, 9.0),
        r"TABLE\['inner'\]\[1\]: planned 3\.0, got 9\.0",
    ),
    "default argument": (
        lambda m: setattr(scaled, "__defaults__", (9.0,)),
        r"scaled\.__defaults__\[0\]: planned 0\.5, got 9\.0"
        if torch.__version__ >= (2, 13)
        else r"model\.part\.func\.__defaults__: planned \(0\.5,\), got \(9\.0,\)",
    ),
    "forward": (lambda m: setattr(m, "forward", nothing), r"model has 'forward', and was planned"),
    "inner forward": (lambda m: setattr(m.drop, "forward", nothing), r"model\.drop has 'forward'"),
    "forward of the class": (
        lambda m: setattr(DropPath, "forward", nothing),
        r"DropPath\.forward: planned DropPath\.forward .*got nothing",
    ),
    "forward that the class inherits": (
        lambda m: setattr(Inheriting, "forward", nothing),
        r"Inheriting\.forward: planned DropPath\.forward .*got nothing"
        r"|__dict__ has 'forward', and was planned without",  # torch 2.15
    ),
    "forward hook": (
        lambda m: m.adapter.low.register_forward_hook(nothing),
        r"model\.adapter\.low has the forward hook nothing .*, and was planned without",
    ),
    "pre-hook": (
        lambda m: m.layers[1].register_forward_pre_hook(nothing),
        r"model\.layers\.1 has the forward-pre hook nothing",
    ),
    "backward hook": (
        lambda m: m.a.register_full_backward_hook(nothing),
        r"model\.a has the backward hook nothing",
    ),
    "hook of the model": (
        lambda m: m.register_full_backward_pre_hook(nothing),
        r"model has the backward-pre hook nothing",
    ),
    "hook of an unregistered module": (
        lambda m: m.unlisted[0].register_forward_hook(nothing),
        r"model\.unlisted\[0\] has the forward hook nothing",
    ),
    "hook of all modules": (
        lambda m: nn.modules.module.register_module_forward_hook(double),
        r"module has the forward hook double",
    ),
    "hook gone": (
        lambda m: m.layers[0]._forward_hooks.clear(),
        r"model\.layers\.0 was planned with the forward hook double .*, and is without",
    ),
    "module added": (
        lambda m: m.layers.append(nn.Linear(6, 6)),
        r"model\.layers\._modules: planned the keys \['0', '1'\], got the keys \['0', '1', '2'\]",
    ),
    "module removed": (lambda m: m.layers.pop(1), "module 'layers.1': planned Tanh, got nothing"),
    "tensor of another shape": (setting(held=torch.ones(1)), r"model\.held: planned float32\[6\]"),
    "tensor that trains": (
        setting(held=torch.ones(6, requires_grad=True)),
        r"model\.held: planned .*got .*requires_grad",
    ),
    "untied": (
        lambda m: setattr(m.b, "weight", nn.Parameter(torch.ones(6, 6))),
        r"b\.weight: planned as one tensor with a\.weight, got a tensor of its own",
    ),
    "assigned state": (
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
        r"b\.weight: planned as one tensor with a\.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changed_is_refused_by_name(planned: PlannedModule, name: str) -> None:
    change, message = REFUSED[name]
    assert_as_original(planned)
    change(planned.original)
    with pytest.raises(GuardError, match=message + ".*plan again"):
        planned(X)
    assert (planned.calls.planned, planned.calls.original) == (1, 0)


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "tensor in place": lambda m: m.held.mul_(3),
    "another tensor": setting(held=torch.full((6,), 3.0)),
    "another tensor in a list": lambda m: m.listed.__setitem__(0, torch.full((6,), 3.0)),
    "an equal configuration": lambda m: setattr(m, "config", copy.deepcopy(m.config)),
    "a module of the same kind": lambda m: setattr(m.adapter, "low", nn.Linear(6, 6)),
    "an unregistered module of the same kind": lambda m: m.unlisted.__setitem__(0, nn.Linear(6, 6)),
    "another parameter": lambda m: setattr(m.a, "bias", nn.Parameter(torch.ones(6))),
    "parameters that became one": lambda m: setattr(m.a, "bias", m.b.bias),
    "idle hook of all modules": lambda m: nn.modules.module.register_module_forward_hook(nothing),
    "what no forward reads": setting(unread=3, spare=nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_changed_is_followed(planned: PlannedModule, name: str) -> None:
    FOLLOWED[name](planned.original)
    assert_as_original(planned)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the model, traced again, gave the planned graph, each time."""
    found: list[bool] = []

    def counted(*args: Any) -> Dependencies | None:
        watches = traced_again(*args)
        found.append(watches is not None)
        return watches

    monkeypatch.setattr("memopt.executor.dependency_check.traced_again", counted)
    return found


def test_a_global_that_makes_no_difference(planned: PlannedModule, traces: list[bool]) -> None:
    """Dynamo asks that a list has its length; what is read from it is there still."""
    TABLE["inner"].append(5.0)
    for _ in range(2):
        assert_as_original(planned)
    assert traces == [True]


def test_a_global_that_makes_one_is_traced_once(planned: PlannedModule, traces: list[bool]) -> None:
    TABLE["inner"][1] = 9.0
    for _ in range(2):
        with pytest.raises(GuardError, match=r"planned 3\.0, got 9\.0"):
            planned(X)
    assert traces == [False]


def test_torch_set_otherwise(planned: PlannedModule) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardError, match=r"get_default_dtype\(\): planned torch\.float32, got"):
            planned(X)
    finally:
        torch.set_default_dtype(torch.float32)


def test_statistics_that_became_one_are_refused() -> None:
    planned = prepare(nn.Sequential(nn.BatchNorm1d(6)), X).planned()
    norm = planned.original[0]
    norm.running_var = norm.running_mean
    with pytest.raises(GuardError, match=r"running_var: planned as a tensor of its own, got one"):
        planned(X)


class Order(tuple[int, ...]):
    """As e3nn's: its length would be a mistake."""

    def __len__(self) -> int:
        raise NotImplementedError


class OfOrder(nn.Linear):
    order = Order((3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.order[0]


def test_a_tuple_without_a_length() -> None:
    model: Any = prepare(OfOrder(6, 6), X).planned()
    assert torch.equal(model(X), model.original(X))
    model.original.order = Order((2, 1))
    with pytest.raises(GuardError, match=r"order"):
        model(X)


def test_a_copy_keeps_to_what_was_planned(subject: PlannedModule) -> None:
    """What the copied model was when it was planned, not when it was copied."""
    model = copy.deepcopy(subject)
    model.original.beta = 0.5
    with pytest.raises(GuardError, match=r"model\.beta: planned 1\.0, got 0\.5"):
        copy.deepcopy(model)(X)
    copied = copy.deepcopy(subject)
    copied.original.held.fill_(7)
    assert_as_original(copied)
    assert_as_original(subject)
    assert not torch.equal(copied(X), subject(X))


@pytest.fixture(scope="module")
def plan() -> tuple[nn.Module, memopt.Plan]:
    torch.manual_seed(0)
    model = Model()
    return model, memopt.plan(model, X, strategy="store-all", progress=False)


def test_changed_between_plan_and_apply(plan: tuple[nn.Module, memopt.Plan]) -> None:
    model, one = plan
    model.beta = 0.5
    try:
        # The same graph with another number: planned anew with it.
        assert_as_original(one.apply(model))
        model.wide = False
        with pytest.raises(memopt.PlanFileError, match=r"model\.\w+: planned .* got .*Plan again"):
            one.apply(model)
    finally:
        model.beta, model.wide = 1.0, True


def test_changed_attributes_replan(plan: tuple[nn.Module, memopt.Plan]) -> None:
    model, one = plan
    planned = one.apply(model, on_mismatch="plan")
    assert_as_original(planned)
    try:
        for _ in range(2):
            model.beta = 0.5
            assert_as_original(planned)
            model.beta = 1.0
            assert_as_original(planned)
        assert (planned.calls.planned, planned.calls.replanned) == (3, 2)
    finally:
        model.beta = 1.0


def test_backward_hooks_from_before_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model[0].register_full_backward_hook(nothing)
    with pytest.raises(memopt.CaptureError, match=r"^module '0' has a full backward hook.*remove"):
        prepare(model, X)
    everywhere = nn.modules.module.register_module_full_backward_hook(nothing)
    try:
        with pytest.raises(memopt.CaptureError, match=r"^all modules have a full backward hook"):
            prepare(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), X)
    finally:
        everywhere.remove()

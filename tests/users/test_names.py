"""Names that memopt gives to a user's module: those that the module uses itself stay its own."""

from __future__ import annotations

import copy
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memopt


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


NAMES = ("calls", "plans", "memopt", "original", "code", "accepts", "count_in")


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        for name in NAMES:
            self.register_buffer(name, torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        y: torch.Tensor = self.linear(x) * self.calls + self.memopt + self.original + self.code
        return y * self.plans


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.memopt, self.original = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.code = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.original(self.memopt(self.calls(x))) * self.code
        return y


class Methods(nn.Module):
    memopt = 2.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def calls(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y

    @property
    def original(self) -> float:
        return 3.0

    def code(self) -> float:
        return 4.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls(x) * self.memopt * self.original + self.code()


class Later(nn.Module):
    """Makes its attribute in its first evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.calls = getattr(self, "calls", 0) + 1
        y: torch.Tensor = self.linear(x)
        return y


def trained(model: nn.Module) -> list[Any]:
    """What two steps and an evaluation give, and what the attributes are then."""
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(2):
        y = model(torch.randn(3, 4))
        y.square().sum().backward()
        found.append(y.detach())
    with torch.no_grad():
        found.append(model.eval()(torch.randn(3, 4)))
    model.train()
    found += [p.grad for p in model.parameters()]
    found += list(model.state_dict().values())
    for name in NAMES:
        value = getattr(model, name, None)
        found.append(value if isinstance(value, (torch.Tensor, float, int)) else None)
    return found


def same(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("kind", [Buffers, Children, Methods, Later])
@pytest.mark.parametrize("way", ["wrap", "apply"])
def test_the_model_keeps_its_names(kind: type[nn.Module], way: str) -> None:
    model = kind()
    if way == "wrap":
        planned: Any = memopt.wrap(model, budget="min", progress=False)
    else:
        planned = memopt.plan(model, torch.randn(3, 4), budget="min", progress=False).apply(model)
    assert same(trained(planned), trained(kind()))
    assert [*planned.state_dict()] == [*kind().state_dict()]
    assert [n for n, _ in planned.named_buffers()] == [n for n, _ in kind().named_buffers()]
    calls = memopt.running(planned).calls
    assert (calls.planned, calls.original) == (2, 1)
    if way == "wrap":
        assert len(memopt.running(model).plans) == 2
        memopt.unwrap(model)
        assert vars(model).keys() == vars(kind()).keys() | ({"calls"} if kind is Later else set())


def test_a_planned_module_gives_and_takes_the_models_own() -> None:
    model: Any = Methods()
    planned: Any = memopt.plan(model, torch.randn(3, 4), progress=False).apply(model)
    assert (planned.original, planned.code(), planned.memopt) == (3.0, 4.0, 2.0)
    assert memopt.running(planned).original is model
    assert "def " in memopt.running(planned).code
    children: Any = Children()
    planned = memopt.plan(children, torch.randn(3, 4), progress=False).apply(children)
    planned.calls = other = nn.Linear(4, 4)
    assert children.calls is other


def unchanged(_module: nn.Module, _args: Any) -> None:
    """A hook of the user's."""


def test_copies_and_pickles_are_plain_and_need_no_memopt() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_pre_hook(unchanged)
    plain = pickle.dumps(model)
    memopt.wrap(model, budget="min", progress=False)
    data = pickle.dumps(model)
    assert not any("memopt" in str(arg) for _, arg, _ in pickletools.genops(data))
    for twin in (copy.deepcopy(model), copy.copy(model), pickle.loads(data)):
        assert vars(twin).keys() == vars(pickle.loads(plain)).keys()
        assert [*twin._forward_pre_hooks.values()] == [unchanged]
    assert len(model._forward_pre_hooks) == 2
    model(torch.randn(3, 4)).sum().backward()
    assert model.calls.planned == 1


class Doubled(nn.Linear):
    """Keeps more in its state than its tensors, and its weight otherwise."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        self.loaded = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return state | {"twice": self.weight.detach() * 2}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        state = {name: value for name, value in state.items() if name != "twice"}
        return super().load_state_dict(state, *args, **kwargs)


def test_a_planned_module_keeps_the_states_of_its_models_class() -> None:
    model = Doubled(4, 4)
    planned = memopt.plan(model, torch.randn(3, 4), progress=False).apply(model)
    assert [*planned.state_dict()] == [*model.state_dict()]
    planned.load_state_dict(planned.state_dict())
    assert planned.loaded == 3


def test_running_is_of_wrapped_and_planned_models() -> None:
    with pytest.raises(ValueError, match="neither wrapped nor planned"):
        memopt.running(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    planned = memopt.plan(model, torch.ones(1, 2), budget=None).apply(model)
    assert memopt.running(planned).calls is planned.calls
    assert memopt.running(memopt.wrap(planned, "1GiB")).plans is planned.memopt.plans


def test_a_class_that_shows_its_parameters_under_other_names() -> None:
    """torch's checkpoint_wrapper leaves its own module out of the names inside of it."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 8), nn.GELU()))
        if planned:
            memopt.wrap(model, "min", "rotor", progress=False)
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    assert all(map(torch.equal, *found))
    first, second = memopt.running(model).plans
    assert second.resident_bytes - first.resident_bytes == sum(one.nbytes for one in found[0])

"""A planned module stands in for its model: names, state, copies, lifetime."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from memopt.errors import ExecutionError
from memopt.executor.apply import runtime_of
from memopt.executor.module import PlannedModule
from tests.executor.harness import Prepared, prepare


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.width = 6

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.layers(x)


@pytest.fixture
def prepared() -> Prepared:
    return prepare(Model(), torch.randn(4, 6))


def test_same_names_and_objects(prepared: Prepared) -> None:
    model, planned = prepared.model, prepared.planned()
    assert list(planned.state_dict()) == list(model.state_dict())
    pairs = zip(planned.named_parameters(), model.named_parameters(), strict=True)
    assert all(a == b and p is q for (a, p), (b, q) in pairs)
    assert [n for n, _ in planned.named_modules()] == [n for n, _ in model.named_modules()]
    assert planned.layers is model.layers
    assert planned.original is model


def test_state_dict_goes_both_ways(prepared: Prepared) -> None:
    planned = prepared.planned()
    state = {name: value + 1 for name, value in prepared.model.state_dict().items()}
    planned.load_state_dict(state)
    assert all(torch.equal(v, state[n]) for n, v in prepared.model.state_dict().items())
    other = Model()
    other.load_state_dict(planned.state_dict())
    assert torch.equal(other(torch.ones(4, 6)), prepared.model(torch.ones(4, 6)))


def test_attributes_and_methods_of_the_model(prepared: Prepared) -> None:
    planned = prepared.planned()
    assert planned.width == 6
    torch.testing.assert_close(planned.twice(torch.ones(4, 6)), 2 * planned(torch.ones(4, 6)))
    with pytest.raises(AttributeError, match="nothing"):
        planned.nothing  # noqa: B018


def test_inner_module_runs_as_it_is(prepared: Prepared) -> None:
    planned = prepared.planned()
    x = torch.randn(4, 6)
    assert planned.layers[0](x).grad_fn.name() == "AddmmBackward0"


def test_mode_reaches_the_model(prepared: Prepared) -> None:
    planned = prepared.planned()
    planned.eval()
    assert not any(m.training for m in prepared.model.modules())
    planned.train()
    assert all(m.training for m in prepared.model.modules())


def test_source_can_be_read(prepared: Prepared) -> None:
    code = prepared.planned().code
    assert code.startswith("def forward(primals):")
    assert "# layers.0" in code
    assert prepared.planned(interpreted=True).code == ""


def test_several_plans_share_one_capture(prepared: Prepared) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    first, second = prepared.planned("store_all"), prepared.planned("recompute_all")
    loss = first(x).sum() + second(x).sum()
    loss.backward()
    assert prepared.waiting == 0


def test_deep_copy_trains_on_its_own(prepared: Prepared) -> None:
    planned, x = prepared.planned("recompute_late"), torch.randn(4, 6)
    copied = copy.deepcopy(planned)
    assert isinstance(copied, PlannedModule)
    assert copied.original is not prepared.model
    assert list(copied.state_dict()) == list(planned.state_dict())
    copied(x).square().sum().backward()
    assert all(p.grad is None for p in planned.parameters())
    planned(x).square().sum().backward()
    for a, b in zip(planned.parameters(), copied.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a.grad, b.grad)


def test_averaged_model(prepared: Prepared) -> None:
    planned = prepared.planned()
    average = torch.optim.swa_utils.AveragedModel(planned)
    average.update_parameters(planned)
    average.eval()
    planned.eval()
    torch.testing.assert_close(average(torch.ones(4, 6)), planned(torch.ones(4, 6)))


def test_deep_copy_of_an_unregistered_parameter_is_refused() -> None:
    outside = torch.ones(6, requires_grad=True)

    class Outside(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * outside

    planned = prepare(Outside(), torch.randn(4, 6)).planned()
    with pytest.raises(ExecutionError, match=r"cannot be copied.*copy planned\.original"):
        copy.deepcopy(planned)


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy])
def test_pickle_is_refused(prepared: Prepared, act) -> None:
    with pytest.raises(ExecutionError, match=r"cannot be pickled.*state_dict\(\).*plan\.save"):
        act(prepared.planned())


def test_state_can_be_saved(prepared: Prepared, tmp_path) -> None:
    torch.save(prepared.planned().state_dict(), tmp_path / "state.pt")
    prepared.planned().load_state_dict(torch.load(tmp_path / "state.pt"))


def test_one_runtime_per_capture(prepared: Prepared) -> None:
    assert runtime_of(prepared.captured) is runtime_of(prepared.captured)


def test_model_goes_when_its_plans_go() -> None:
    """Nothing global keeps a captured model, its parameters or its example inputs."""

    def train() -> list[weakref.ref]:
        model, x = Model(), torch.randn(4, 6)
        prepared = prepare(model, x)
        planned = prepared.planned("recompute_late")
        planned(x).sum().backward()
        kept = (model, model.layers[0].weight, x, planned, prepared.captured.hooks)
        return [weakref.ref(one) for one in kept]

    found = train()
    gc.collect()
    assert [reference() for reference in found] == [None] * 5


def test_train_step_of_a_wrapped_planned_module(prepared: Prepared) -> None:
    """The planned module inside another module, and under the user's own checkpoint."""
    from torch.utils.checkpoint import checkpoint

    planned, x = prepared.planned("recompute_all"), torch.randn(4, 6)
    outer = nn.Sequential(planned, nn.Linear(6, 2))
    outer(x).sum().backward()
    expected = [p.grad.clone() for p in planned.parameters()]
    outer.zero_grad()
    start = copy.deepcopy(prepared.model.state_dict())
    hidden = checkpoint(planned, x, use_reentrant=False)
    outer[1](hidden).sum().backward()
    prepared.model.load_state_dict(start)
    assert all(torch.equal(p.grad, e) for p, e in zip(planned.parameters(), expected, strict=True))
    assert prepared.waiting == 0

"""Batches that are objects: the forward gets one of the same class, and steps are eager's."""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError, GuardError
from memopt.step.inputs import to_call

Named = namedtuple("Named", "x scale")  # what users write


@dataclass
class Batch:
    x: Tensor
    scale: float = 2.0

    @property
    def scaled(self) -> Tensor:
        return self.x * self.scale


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    scale: float = 2.0


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.inner, self.scale = [Batch(x)], 2.0

    @property
    def x(self) -> Tensor:
        return self.inner[0].scaled


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Mapped(Mapping[str, Any]):
    def __init__(self, x: Tensor) -> None:
        self._held = {"x": x, "scale": 2.0}

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _encoding(x: Tensor) -> Any:
    from transformers import BatchEncoding

    made = BatchEncoding({"x": x, "scale": 2.0})
    made._encodings = [object()]  # type: ignore[list-item]  # as a fast tokenizer leaves behind
    return made


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Batch,
    "frozen": Frozen,
    "namedtuple": lambda x: Named(x, 2.0),
    "class": Plain,
    "namespace": lambda x: argparse.Namespace(x=x, scale=2.0),
    "OrderedDict": lambda x: OrderedDict(x=x, scale=2.0),
    "UserDict": lambda x: UserDict(x=x, scale=2.0),
    "BatchEncoding": _encoding,
    "attributes": lambda x: Attributes(x=x, scale=2.0),
    "Mapping": Mapped,
    "nested": lambda x: {"batches": [Batch(x)]},
}


class Net(nn.Module):
    """Reads a batch as what it is."""

    kind: type

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Any) -> Tensor:
        assert type(batch) is self.kind
        if "batches" in batch if isinstance(batch, dict) else False:
            batch = batch["batches"][0]
        if isinstance(batch, Mapping | UserDict):
            result: Tensor = self.linear(batch["x"]) * batch["scale"]
            return result
        result = self.linear(batch.x) * batch.scale
        return result


def _net(example: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.kind = type(example)
    return model


def _same(planned: nn.Module, twin: nn.Module, batch: Any) -> None:
    for model in (planned, twin):
        model.zero_grad()
        model(batch).square().sum().backward()
    for ours, theirs in zip(planned.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_eagers_and_plans_are_kept(name: str) -> None:
    make = KINDS[name]
    model = _net(make(torch.randn(2, 3)))
    twin = copy.deepcopy(model)
    for _ in range(2):
        # The second takes the plan from disk.
        planned = memopt.wrap(model, budget="min", progress=False, cache=True)
        for _ in range(2):
            _same(planned, twin, make(torch.randn(2, 3)))
        assert (planned.calls.planned, planned.calls.original) == (2, 0)
        memopt.unwrap(model)


def test_a_number_in_an_object_is_a_part_of_the_plan() -> None:
    model = _net(Batch(torch.randn(2, 3)))
    plan = memopt.plan(model, Batch(torch.randn(2, 3)), budget="min", progress=False)
    planned = plan.apply(model)
    with pytest.raises(GuardError, match=r"planned 2.0, got 3.0"):
        planned(Batch(torch.randn(2, 3), 3.0))
    other = r"planned model\(Batch\(scale=2.0, x=float32\[2, 3\]\)\), got model\(Frozen"
    with pytest.raises(GuardError, match=other):
        planned(Frozen(torch.randn(2, 3)))


def test_a_plan_file_holds_objects(tmp_path: Path) -> None:
    example = Batch(torch.randn(2, 3))
    model = _net(example)
    twin = copy.deepcopy(model)
    path = tmp_path / "plan.json"
    memopt.plan(model, example, budget="min", progress=False).save(path)
    plan = memopt.load(path)
    with pytest.raises(memopt.PlanFileError, match=r"contain .*Batch.*: pass apply\(model, inputs"):
        plan.apply(model)
    _same(plan.apply(model, example), twin, Batch(torch.randn(2, 3)))


def test_a_whole_step_takes_objects() -> None:
    model = _net(Batch(torch.randn(2, 3)))
    twin = copy.deepcopy(model)
    example, target = Batch(torch.randn(2, 3)), torch.randn(2, 3)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, twin)]
    plan = memopt.plan(
        model,
        example,
        budget="min",
        loss_fn=nn.functional.mse_loss,
        targets=target,
        optimizer=optimizers[0],
        whole_step=True,
        progress=False,
    )
    step = plan.train_step(model, nn.functional.mse_loss, optimizer=optimizers[0])
    loss = step(example, targets=target)
    expected = nn.functional.mse_loss(twin(example), target)
    expected.backward()
    optimizers[1].step()
    assert torch.equal(loss, expected)
    assert torch.equal(model.linear.weight, twin.linear.weight)


class Marks(Net):
    def forward(self, batch: Any) -> Tensor:
        batch.seen = batch.x.sum()
        return super().forward(batch)


class Counts(Net):
    def forward(self, batch: Any) -> Tensor:
        batch.inner[0].scale += 1
        return super().forward(batch)


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        (Marks, Batch, "'seen' of the Batch"),
        (Counts, Plain, "'scale' of the Batch"),
    ],
)
def test_a_forward_that_changes_its_batch_is_refused(
    kind: type[Net], make: Callable[[Tensor], Any], message: str
) -> None:
    model, batch = kind(), make(torch.randn(2, 3))
    model.kind = type(batch)
    before = repr(vars(batch))
    with pytest.raises(CaptureError, match=f"the forward changes {message}"):
        memopt.wrap(model, progress=False)(batch)
    assert repr(vars(batch)) == before


@pytest.mark.parametrize("other", [{1}, SimpleNamespace(), MappingProxyType({})])
def test_what_no_graph_takes_is_named(other: Any) -> None:
    batch: Any = Batch(torch.randn(2, 3))
    batch.other = other
    message = f"a Batch whose 'other' is a {type(other).__name__}; memopt takes"
    with pytest.raises(CaptureError, match=message):
        memopt.wrap(_net(batch), progress=False)(batch)
    with pytest.raises(CaptureError, match=message):
        memopt.plan(_net(batch), batch, progress=False)


def test_an_object_that_holds_itself_is_named() -> None:
    batch: Any = Batch(torch.randn(2, 3))
    batch.parent = batch
    with pytest.raises(CaptureError, match=r"a Batch whose 'parent' is a Batch; memopt takes"):
        memopt.wrap(_net(batch), progress=False)(batch)


def test_an_object_is_one_argument() -> None:
    call = to_call(Batch(torch.randn(2)))
    assert len(call.args) == 1
    assert len(call.tensors()) == 1

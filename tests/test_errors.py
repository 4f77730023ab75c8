"""Every misuse is said so, with its remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import memopt
from memopt.models.chain import Stage
from memopt.models.graph import Operator


def plan(model: Any, inputs: Any = None, **options: Any) -> memopt.Plan:
    return memopt.plan(
        model, torch.randn(4, 6) if inputs is None else inputs, progress=False, **options
    )


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)


class Item(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y * math.erf(y.sum().item())


class Chance(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y if torch.rand(()) > 0.5 else -y


class Inverse(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.a.weight) @ self.a(x).T


class Selects(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y[y > 0]


class Nonzero(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y[(y > 0).nonzero()[:, 0]]


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 1, lambda t: self.a(t).sin(), lambda t: self.a(t).cos(), (x,))


class Underivable(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.igamma(self.a(x).exp(), x.exp())


class Detached(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).detach()


class Integers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).argmax(-1)


class Fails(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, :3])


HERE = re.escape(__file__)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Item,
            rf"out of a tensor at {HERE}:\d+ \(return y \* round\(y\.sum\(\)\.item\(\).*where",
        ),
        (Chance, rf"one graph at {HERE}:\d+ \(return y if torch\.rand.*else -y\).*torch\.where"),
        (Inverse, r"_linalg_check_errors.*inv_ex"),
        (Selects, rf"depends on the values of a tensor at {HERE}:\d+ \(return y\[y > 0\]\).*mask"),
        (Nonzero, rf"a tensor at {HERE}:\d+ \(return .*nonzero.*\).*torch\.where"),
        (Branches, r"higher-order operator .*replace torch\.cond"),
        (lambda: torch.jit.script(two_layers()), "use the Python module that this was made of"),
        (Underivable, r"backward cannot be traced: .*igamma.*without a derivative"),
        (Detached, "nothing to train: no output of the model has a gradient"),
        (Integers, "nothing to train: no output of the model has a gradient"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_model_that_cannot_be_captured(model: type[nn.Module], message: str) -> None:
    with pytest.raises(memopt.CaptureError, match=message):
        plan(model())


def test_an_error_being_handled_is_no_cause_of_the_next() -> None:
    """A loop that tries a model, and where it is refused another, hears of the other."""
    try:
        plan(Item())
    except memopt.CaptureError as error:
        first = str(error)
        with pytest.raises(memopt.CaptureError, match=r"return y if torch\.rand") as second:
            plan(Chance())
    assert str(second.value) != first
    assert second.value.modules == ()


# A loss is asked for its gradients at the capture; what is wrong before it is still said first.
with_and_without_a_loss = pytest.mark.parametrize("loss_fn", [None, torch.sum], ids=["", "loss"])


@with_and_without_a_loss
def test_nothing_requires_a_gradient(loss_fn: Any) -> None:
    with pytest.raises(memopt.CaptureError, match=r"nothing to train.*requires_grad_\(\)"):
        plan(two_layers().requires_grad_(False), loss_fn=loss_fn)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("padding", [None, 0])
def test_sparse_gradients(kind: Any, padding: int | None) -> None:
    model = nn.Sequential(kind(10, 6, padding_idx=padding, sparse=True))
    inputs = torch.tensor([[1, 2]])
    with pytest.raises(memopt.CaptureError, match=r"sparse tensor.*sparse=False") as caught:
        plan(model, inputs)
    assert caught.value.modules == ("0",)
    model[0].sparse = False
    plan(model, inputs)


def test_failing_capture_leaves_the_model_as_it_was() -> None:
    model = Item()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with pytest.raises(memopt.CaptureError):
        plan(model, torch.ones(4, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("text", r"inputs must be a tensor, a tuple .* got str"),
        (3, r"inputs must be a tensor, a tuple .* got int"),
        (DataLoader([1.0]), r"one example batch.*next\(iter\(loader\)\)"),  # type: ignore[arg-type]
        ({1: torch.ones(1)}, r"keyword arguments need names, got the key 1"),
        ({"y": torch.ones(4, 6)}, r"missing .* 'input'.*\(batch,\) where the whole dict is one"),
        ((torch.ones(4, 6), 2), r"too many positional arguments"),
        (torch.ones(4, 7), r"without memopt it fails, too.*mat1 and mat2"),
        (torch.ones(4, 6, dtype=torch.long), r"without memopt it fails, too.*dtype"),
    ],
)
@with_and_without_a_loss
def test_inputs_that_do_not_fit(inputs: Any, message: str, loss_fn: Any) -> None:
    with pytest.raises(ValueError, match=message):
        plan(two_layers(), inputs, loss_fn=loss_fn)


@with_and_without_a_loss
def test_model_that_fails_by_itself(loss_fn: Any) -> None:
    with pytest.raises(ValueError, match="without memopt it fails, too"):
        plan(Fails(), loss_fn=loss_fn)


class Casts(Layers):
    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.a(x).to(dtype)


def test_other_arguments() -> None:
    with pytest.raises(memopt.CaptureError, match=r"called with a dtype.*as attributes"):
        plan(Casts(), (torch.randn(4, 6), torch.float64))


def test_missing_inputs() -> None:
    with pytest.raises(ValueError, match="example inputs are needed"):
        memopt.compare(two_layers(), progress=False)


def test_not_a_model() -> None:
    with pytest.raises(ValueError, match=r"takes an nn\.Module .* or a memopt Chain or Graph, got"):
        plan(lambda x: x)


def test_what_cannot_be_measured_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"on 'meta', and memopt measures on cpu, cuda, .*.estimate."
    ):
        plan(two_layers().to("meta"), torch.ones(4, 6, device="meta"))


def test_mixed_devices() -> None:
    with pytest.raises(ValueError, match="on one device, found cpu, meta; move them"):
        plan(two_layers(), torch.ones(4, 6, device="meta"))


@pytest.mark.parametrize(
    "budget",
    [
        "6 gigs",
        "",
        "6.5",
        "-5GiB",
        "1e9",
        "max",
        0,
        -1,
        0.0,
        1.5,
        math.nan,
        math.inf,
        True,
        b"6GiB",
    ],
)
def test_unreadable_budget(budget: Any) -> None:
    with pytest.raises(
        ValueError, match=r'whole number of bytes.*\(0, 1\].*"6GiB".*"min", or None'
    ):
        plan(two_layers(), budget=budget)


@pytest.mark.parametrize("strategy", ["store-all", "sequential", "rotor"])
def test_budget_too_small(strategy: str) -> None:
    model = two_layers()
    with pytest.raises(memopt.InfeasibleBudgetError) as caught:
        plan(model, budget=100, strategy=strategy)
    smallest = caught.value.smallest_budget_bytes
    assert smallest is not None
    assert caught.value.budget_bytes == 100
    assert re.search(
        rf"{strategy} cannot train within 100 bytes.*feasible budget known is {smallest} bytes",
        str(caught.value),
    )
    found = plan(model, budget=smallest, strategy=strategy)
    assert found.peak_bytes <= smallest
    with pytest.raises(memopt.InfeasibleBudgetError):
        plan(model, budget=smallest - 1, strategy=strategy)


def test_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'rotr'") as caught:
        plan(two_layers(), strategy="rotr")
    assert all(name in str(caught.value) for name in memopt.strategies())
    with pytest.raises(ValueError, match="unknown strategy a Tensor"):
        plan(two_layers(), strategy=torch.ones(3))  # type: ignore[arg-type]


def test_a_class_in_place_of_a_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"plan takes an nn\.Module .*, got type"):
        memopt.plan(nn.Linear, torch.ones(3), budget="1GiB")


@pytest.mark.parametrize(
    ("loss_fn", "targets", "message"),
    [
        (3, (), r"loss_fn must be callable as loss_fn\(output, \*targets\), got 3"),
        (lambda y: y, (), r"must return one number.*got a tensor of shape \[4, 6\]"),
        (lambda y: y.detach().sum(), (), r"must return one number.*without a gradient"),
        (lambda y: 0.5, (), r"must return one number.*got float"),
        (None, (1,), r"targets= needs loss_fn="),
    ],
)
def test_loss(loss_fn: Any, targets: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(two_layers(), loss_fn=loss_fn, targets=targets)


_STEP = {"loss_fn": lambda y: y.sum(), "whole_step": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "x"}, "order= is True or False, got 'x'"),
        ({"place": 1}, "place= is True or False, got 1"),
        ({"accumulate": 4}, "accumulate= is True or False, got 4"),
        ({"cache": "no"}, "cache= is True or False, got 'no'"),
        ({"whole_step": "auto"}, "whole_step= is True or False, got 'auto'"),
        ({"device": "cuda"}, "device= is the name of a preset.*got 'cuda': leave it out"),
        ({"device": torch.device("cpu")}, "device= is the name of a preset.*leave it out"),
        ({"host_budget": torch.ones(2)}, "host_budget is bytes or a string such as '6GiB'"),
        ({"clip_norm": "1"}, "clip_norm is a positive number, got '1'"),
        ({"norm_type": None}, r"norm_type is positive, 2\.0 or math\.inf say, got None"),
        ({"scaler": True}, r"scaler= is a torch\.amp\.GradScaler, got True"),
        ({**_STEP, "strategy": "offload-graph", "movable": True}, '"all", got True'),
    ],
)
def test_an_option_of_another_kind(options: dict[str, Any], message: str) -> None:
    model = two_layers()
    if "whole_step" in options:
        options = {**options, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(ValueError, match=message):
        plan(model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"improve": None}, "improve= is True or False, got None"),
        ({"most_plans": 0}, "most_plans= is a whole number, at least 1, got 0"),
        ({"most_plans": "2"}, "most_plans= is a whole number, at least 1, got '2'"),
        ({"shapes": torch.ones(4, 6)}, "shapes= is a list of example inputs.*got Tensor"),
        ({"shapes": 3}, "shapes= is a list of example inputs.*got int"),
        ({"parts": True}, 'parts= is "auto" or names of sub-modules.*got True'),
        ({"parts": ["0", 1]}, 'parts= is "auto" or names of sub-modules.*got 1'),
        ({"targets": (1,)}, "targets= needs loss_fn="),
    ],
)
def test_an_option_of_another_kind_leaves_the_model_unwrapped(
    options: dict[str, Any], message: str
) -> None:
    model = two_layers()
    with pytest.raises(ValueError, match=message):
        memopt.wrap(model, **options)
    with pytest.raises(ValueError, match="not wrapped"):
        memopt.unwrap(model)


def chain() -> memopt.Chain:
    return memopt.Chain(1, [Stage(1, 1, 1, 1, 1), Stage(0, 0, 0, 0, 0)])


def test_inputs_with_a_cost_model() -> None:
    with pytest.raises(ValueError, match="go with a module"):
        plan(chain())


def test_one_strategy_and_one_budget_may_come_by_themselves() -> None:
    made = memopt.compare(chain(), budgets="1MiB", strategies="sequential", progress=False)
    assert [(cell.strategy, cell.budget_bytes) for cell in made.cells] == [("sequential", 2**20)]
    with pytest.raises(ValueError, match="unknown strategy a int"):
        memopt.compare(chain(), strategies=5, progress=False)  # type: ignore[arg-type]


def test_progress_of_another_kind() -> None:
    with pytest.raises(ValueError, match="progress= is True or False, got 'no'"):
        memopt.plan(two_layers(), torch.randn(4, 6), progress="no")  # type: ignore[arg-type]


def test_plan_of_a_cost_model_cannot_run() -> None:
    made = memopt.plan(chain(), progress=False)
    with pytest.raises(ValueError, match=r"from a cost model.*memopt\.plan\(model, inputs"):
        made.apply(two_layers())


STAGE = {"forward_time_s": 1.0, "backward_time_s": 1.0, "output_bytes": 1, "saved_bytes": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage(**{**STAGE, "forward_time_s": math.nan}, gradient_bytes=1), "finite.*nan"),
        (lambda: Stage(**{**STAGE, "backward_time_s": math.inf}, gradient_bytes=1), "finite.*inf"),
        (lambda: Stage(**{**STAGE, "forward_time_s": -1}, gradient_bytes=1), "at least 0, got -1"),
        (lambda: Stage(**{**STAGE, "output_bytes": -1}, gradient_bytes=1), "output_bytes.*got -1"),
        (lambda: Stage(**{**STAGE, "saved_bytes": 1.5}, gradient_bytes=1), "whole number.*1.5"),
        (lambda: Operator("x", (), (0,), math.nan), "Operator 'x': time_s .*finite.*nan"),
        (lambda: Operator("x", (), (0,), -0.5), "Operator 'x': time_s .*at least 0, got -0.5"),
        (lambda: Operator("x", (), (0,), 1.0, workspace_bytes=-3), "workspace_bytes .*got -3"),
        (lambda: memopt.Tensor("t", -4), "Tensor 't': size_bytes .*got -4"),
    ],
)
def test_impossible_costs(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_errors_share_a_base() -> None:
    names = [n for n in dir(memopt) if n.endswith("Error")]
    assert len(names) >= 8
    assert all(issubclass(getattr(memopt, n), memopt.MemoptError) for n in names)

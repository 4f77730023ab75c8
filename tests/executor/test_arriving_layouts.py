"""Gradients that arrive in another memory layout than the output has."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt

Return = Callable[[Tensor], Tensor]


class Positions(nn.Module):
    """Wav2Vec2's position embeddings: a convolution over time, of rows of features."""

    def __init__(self, returned: Return) -> None:
        super().__init__()
        self.convolution, self.returned = nn.Conv1d(8, 8, 4, padding=2), returned

    def forward(self, x: Tensor) -> Tensor:
        return self.returned(functional.gelu(self.convolution(x.transpose(1, 2))))


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def contiguous(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def gradients(model: nn.Module, weights: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        (model(torch.linspace(-1, 1, 2 * 9 * 8).view(2, 9, 8)) * weights).sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def planned(model: nn.Module) -> nn.Module:
    inputs = torch.randn(2, 9, 8)
    return memopt.plan(model, inputs, strategy="store-all", progress=False).apply(model)


def test_it_is_said_once_and_the_remedy_works() -> None:
    weights = torch.randn(2, 10, 8)
    if torch.__version__ < (2, 13):  # it traces backwards of rows, whatever the output's layout
        weights = weights.mT.contiguous().mT
    with pytest.warns(UserWarning, match=r"another memory layout.*contiguous\(\)") as said:
        gradients(planned(Positions(transposed)), weights)
    assert sum("memory layout" in str(one.message) for one in said) == 1
    model, weights = Positions(contiguous), weights.contiguous()
    plain = gradients(copy.deepcopy(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, gradients(planned(model), weights), plain))


def test_nothing_is_said_of_gradients_that_are_put_in_rows() -> None:
    """As of a linear layer's: eager copies another layout, too."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    weights = torch.randn(2, 8, 9).transpose(1, 2)
    plain = gradients(copy.deepcopy(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, gradients(planned(model), weights), plain))


def test_it_is_said_of_what_is_scaled_up_with_its_channels_last() -> None:
    """A segmentation head: bilinear sampling keeps the layout, and the bias's sum minds it."""
    model = nn.Sequential(nn.Conv2d(8, 3, 1), nn.UpsamplingBilinear2d(scale_factor=4))
    x = torch.linspace(-1, 1, 2 * 8 * 8 * 8).view(2, 8, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last)
    step = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    with pytest.warns(UserWarning, match="another memory layout"):
        step(x).square().mean().backward()


def test_it_is_said_of_what_a_view_lays_out_otherwise() -> None:
    """A bias for attention: with one sequence, eager's backward sees other rows in the gradient,
    and copies nothing."""

    def heads_first(x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).reshape(2, 12, 12)

    model = nn.Sequential(nn.Linear(32, 2), Returned(heads_first))
    x = torch.randn(1, 12, 12, 32)
    step = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    weights = torch.randn(2, 12, 12)
    if torch.__version__ < (2, 13):  # it traces backwards of rows, whatever the output's layout
        weights = heads_first(torch.randn(1, 12, 12, 2))
    with pytest.warns(UserWarning, match="another memory layout"):
        (step(x) * weights).sum().backward()


class Returned(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, returned: Return) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: Tensor) -> Tensor:
        return self.returned(x)


class Head(nn.Module):
    """A small network of images, with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def trained(model: nn.Module, steps: int, switched: int) -> list[list[Tensor]]:
    """What steps leave behind, whose gradients have their channels last from one step on."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        output = model(torch.randn(4, 3, 12, 12))
        weights = torch.randn(output.shape)
        if step >= switched:
            weights = weights.contiguous(memory_format=torch.channels_last)
        model.zero_grad()
        (output * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*gradients, *model.buffers(), torch.get_rng_state()])
    return found


def test_a_wrapped_model_is_planned_for_the_layout_that_arrives() -> None:
    torch.manual_seed(0)
    model = Head()
    expected = trained(copy.deepcopy(model), 8, switched=5)
    memopt.wrap(model, "min", strategy="rotor", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(model, 8, switched=5)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    calls = memopt.running(model).calls
    assert (calls.planned, calls.original) == (8, 0)
    assert len(memopt.running(model).plans) > 1


def test_a_first_step_that_is_metered_runs_as_the_original_where_it_cannot_be_planned() -> None:
    torch.manual_seed(0)
    model = Head()
    expected = trained(copy.deepcopy(model), 3, switched=0)
    memopt.wrap(model, "min", strategy="rotor", progress=False)
    with pytest.warns(UserWarning, match="arrives in another memory layout.*the original"):
        found = trained(model, 3, switched=0)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    calls = memopt.running(model).calls
    assert (calls.planned, calls.original) == (2, 1)
    # The plan keeps the layout, so that it is the same one elsewhere.
    (strides,) = memopt.running(model).plans[-1].output_gradients.strides
    assert strides == (0, (3 * 12 * 12, 1, 3 * 12, 3))


def test_what_a_forward_leaves_behind_is_trained_as_before() -> None:
    """Its gradient is none of an output's: the others are copied, which is said."""

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).tanh()
            self.penalty = y.square().mean()
            return self.last(y)  # type: ignore[no-any-return]

    model = Leaving()
    memopt.wrap(model, "min", strategy="store-all", progress=False)
    output = model(torch.randn(4, 3, 12, 12))
    weights = torch.randn(output.shape).contiguous(memory_format=torch.channels_last)
    with pytest.warns(UserWarning, match="another memory layout.*copied first"):
        ((output * weights).sum() + model.penalty).backward()
    calls = memopt.running(model).calls
    assert (calls.planned, calls.original) == (1, 0)


def alternate(model: nn.Module) -> None:
    """Steps whose gradients arrive in one layout and in another, in turns."""
    for step in range(12):
        output = model(torch.randn(4, 3, 12, 12))
        last = torch.channels_last if step % 2 else torch.contiguous_format
        (output * torch.randn(output.shape).contiguous(memory_format=last)).sum().backward()


def test_a_loss_that_lays_its_gradients_out_otherwise_each_time_is_said() -> None:
    torch.manual_seed(0)
    model = Head()
    memopt.wrap(model, "min", strategy="store-all", progress=False)
    with pytest.warns(UserWarning, match="another memory layout.*copied first"):
        alternate(model)


class _Scaled(nn.Module):
    """Two outputs, which lie otherwise than a loss's gradients, and one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x.mT).mT
        return y * 1.395, y


def test_a_missing_gradient_lends_its_layout_to_no_sum() -> None:
    """The sum of a missing gradient and another one lies as the other one does."""
    torch.manual_seed(0)
    model = _Scaled()
    plain, applied, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(4, 3, 6)
    weights = torch.linspace(0.5, 1.5, 72).view(4, 3, 6)

    def found(one: nn.Module, x: Tensor) -> list[Tensor]:
        one.zero_grad()
        (one(x)[0] * weights).sum().backward()
        return [p.grad for p in one.parameters() if p.grad is not None]

    memopt.wrap(model, "min", progress=False, cache=False)
    for factor in range(1, 7):
        assert all(map(torch.equal, found(model, x * factor), found(plain, x * factor)))
    assert memopt.running(model).calls.planned >= 5
    step = memopt.plan(applied, x, strategy="store-all", progress=False).apply(applied)
    with pytest.warns(UserWarning, match="another memory layout"):
        (step(x)[0] * weights).sum().backward()


def test_parts_are_planned_for_the_layouts_that_arrive() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.part(self.first(x).tanh())
            return y.mT @ y if y.sum().item() < 1e9 else y

    torch.manual_seed(0)
    model, x = Whole(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        memopt.wrap(model, "min", parts="auto", progress=False)
        for _ in range(3):
            for one in (model, plain):
                one.zero_grad()
                (one(x) * torch.arange(64.0).view(8, 8)).sum().backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def _sums(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss(model(torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8).sin())).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _as_planned(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> bool:
    """Whether gradients are eager's; each warning is an error."""
    torch.manual_seed(0)
    example = torch.randn(4, 3, 8, 8)
    plan = memopt.plan(model, example, strategy="store-all", progress=False)
    expected = _sums(copy.deepcopy(model), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return all(map(torch.equal, _sums(plan.apply(model), loss), expected))


@pytest.mark.parametrize("loss", [torch.sum, torch.mean, lambda output: output.sum() * 1.37])
@pytest.mark.parametrize(
    "last", [nn.BatchNorm2d(8), nn.SiLU(), nn.Sequential(nn.Flatten(), nn.Linear(288, 5))]
)
def test_an_expanded_gradient_is_read_as_it_arrives(
    last: nn.Module, loss: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    assert _as_planned(nn.Sequential(nn.Conv2d(3, 8, 3), copy.deepcopy(last)), loss)


def test_hooks_of_an_output_change_its_gradient_before_it_is_looked_at() -> None:
    def loss(output: Tensor) -> Tensor:
        output.register_hook(lambda gradient: gradient * torch.linspace(0, 1, gradient.shape[-1]))
        output.register_hook(lambda gradient: gradient[..., :1].expand_as(gradient) + 0.37)
        return output.sum()

    torch.manual_seed(0)
    assert _as_planned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), loss)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def last_channels(*last: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *last)
    return model.to(memory_format=torch.channels_last)


def test_an_expanded_gradient_of_which_kernels_make_another_layout_is_said() -> None:
    torch.manual_seed(0)
    model = last_channels(nn.BatchNorm2d(8), Scaled())
    with pytest.raises(UserWarning, match=r"arrives expanded.*output \* 1.0"):
        _as_planned(copy.deepcopy(model), torch.sum)
    x, target = torch.randn(4, 3, 8, 8), torch.empty(0)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return (output * 1.0).sum()

    plan = memopt.plan(model, x, strategy="store-all", loss_fn=loss, targets=target, progress=False)
    applied, plain = plan.apply(model), copy.deepcopy(model)
    loss(applied(x), target).backward()
    loss(plain(x), target).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_layouts_that_torch_describes_wrongly_are_known() -> None:
    torch.manual_seed(0)
    model = last_channels(nn.BatchNorm2d(8), nn.Hardswish())
    with pytest.raises(UserWarning, match="another memory layout"):
        _as_planned(model, torch.mean)


def test_a_gradient_with_gaps_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    def loss(output: Tensor) -> Tensor:
        return torch.cat([output, output.detach()], 3).square().sum()

    with pytest.raises(UserWarning, match=r"arrives with gaps.*output \* 1.0"):
        _as_planned(copy.deepcopy(model), loss)
    assert _as_planned(copy.deepcopy(model), lambda output: loss(output * 1.0))

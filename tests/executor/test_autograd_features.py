"""no_grad regions, user autograd functions, checkpointing inside, autocast, layouts, norms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import ExecutionError
from tests.executor.harness import PROGRAMS, Case, check, prepare


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)


class NoGrad(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.a(x).softmax(-1)
        y = self.b(x)
        with torch.no_grad():
            z = y * 2
            with torch.enable_grad():
                w = self.a(z).tanh()
        return y * target + w * z


class Detached(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y.detach() * y)


class OwnGradient(torch.autograd.Function):
    """Its gradients are wrong on purpose, to see that they are used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w * 7, (gradient * x).sum(0) * 3


class UserFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(OwnGradient.apply(self.a(x), self.b.bias))


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def part(t: Tensor) -> Tensor:
            return functional.dropout(self.a(t).tanh(), 0.5).exp()

        return self.b(checkpoint(part, x, use_reentrant=False))


class NormInCheckpoint(Layers):
    """Torch runs the norm twice in a step; without the checkpoint it is the same function."""

    def __init__(self, wrapped: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        if self.wrapped:
            return self.b(checkpoint(self.norm, self.a(x), use_reentrant=False))
        return self.b(self.norm(self.a(x)))


class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(functional.gelu(self.a(x)))
        return functional.layer_norm(y.float(), (6,))


class Mixed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(functional.gelu(self.a(x)))
        return functional.layer_norm(y, (6,)).softmax(-1)


class Attention(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (layer(x).view(2, 2, 2, 3).transpose(1, 2) for layer in (self.a, self.b))
        attend = functional.scaled_dot_product_attention
        return attend(q, k, q, is_causal=True, dropout_p=0.1), attend(q, k, q, is_causal=True)


class Spectrum(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.a(x)).abs() + self.b(x)[:, :4]


class Doubles(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).double().sum(-1)


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 6),)


MODELS = [NoGrad, Detached, UserFunction, Checkpointed, AutocastInside, Spectrum, Doubles]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_features(model: type[nn.Module]) -> None:
    check(Case(model, rows))


def test_attention() -> None:
    check(Case(Attention, lambda: (torch.randn(2, 2, 6),)))


def test_user_function_is_really_used() -> None:
    model, x = UserFunction(), torch.randn(4, 6)
    prepared = prepare(model, x)
    prepared.planned("recompute_late")(x).sum().backward()
    y = model.a(x).detach()
    upstream = torch.ones(4, 6) @ model.b.weight.detach()
    expected = (upstream * y).sum(0) * 3 + 4
    torch.testing.assert_close(model.b.bias.grad, expected)


def test_autocast_around_the_step() -> None:
    check(Case(Mixed, rows, context=lambda: torch.autocast("cpu", torch.bfloat16)))


def test_backward_inside_autocast_runs_what_was_planned() -> None:
    model, x = Mixed(), torch.randn(4, 6)
    model(x)[:, 0].sum().backward()
    expected = model.a.weight.grad
    planned = prepare(model, x).planned("recompute_late")
    model.zero_grad()
    loss = planned(x)[:, 0].sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert torch.equal(model.a.weight.grad, expected)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, groups=8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x)).relu()
        return self.second(functional.max_pool2d(y, 2)), y


def test_channels_last() -> None:
    def inputs() -> tuple[Tensor]:
        return (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)

    check(Case(Convolutions, inputs))


class Normed(nn.Module):
    """One batch norm used twice; a layer in eval mode inside a model in train mode."""

    def __init__(self, *, keep: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen
        self.linear = nn.Linear(6, 6)
        self.shared = nn.BatchNorm1d(6, track_running_stats=keep)
        self.last = nn.BatchNorm1d(6)

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        if self.frozen:
            self.last.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.linear(x)).relu()
        return self.last(self.linear(self.shared(y)).exp())


@pytest.mark.parametrize(
    ("keep", "frozen", "training"),
    [(True, False, True), (True, False, False), (True, True, True), (False, False, True)],
    ids=["train", "eval", "partly-eval", "no-statistics"],
)
def test_batch_norm(keep: bool, frozen: bool, training: bool) -> None:
    check(Case(lambda: Normed(keep=keep, frozen=frozen), rows, training=training))


def test_statistics_move_once_however_often_a_norm_runs() -> None:
    model, x = Normed(), torch.randn(4, 6)
    graph = prepare(model, x).graph
    norms = [i for i, o in enumerate(graph.operators) if "batch_norm" in o.target]
    assert any(graph.operators[i].recomputable for i in norms)
    before = int(model.last.num_batches_tracked)
    prepare(model, x).planned("recompute_late")(x).sum().backward()
    assert int(model.last.num_batches_tracked) == before + 1


class InstanceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.norm(self.convolution(x)).relu())


def test_other_norms() -> None:
    check(Case(InstanceNormed, lambda: (torch.randn(2, 3, 8, 8),)))


class Draws(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.b(functional.dropout(self.a(x), 0.5)) * torch.rand_like(x) + torch.randn(6)
        picked = torch.multinomial(self.a(x).softmax(-1), 2)
        return (
            functional.rrelu(y, training=True).gather(1, picked),
            functional.gumbel_softmax(y, hard=True),
            torch.bernoulli(x.sigmoid()),
        )


def test_random_operators() -> None:
    check(Case(Draws, rows))


def test_every_random_operator_is_marked() -> None:
    graph = prepare(Draws(), torch.randn(4, 6)).graph
    random = [o.target for o in graph.operators if o.random]
    assert len(random) == 7, random


@pytest.mark.parametrize("program", PROGRAMS)
def test_steps_draw_new_numbers(program: str) -> None:
    planned = prepare(Checkpointed(), torch.randn(4, 6)).planned(program)
    x = torch.randn(4, 6)
    first, second = planned(x), planned(x)
    assert not torch.equal(first, second)


def test_buffers_updated_in_a_checkpoint_are_updated_once_and_a_note_says_so() -> None:
    """Torch's recomputation moves the statistics a second time; memopt's never does."""
    torch.manual_seed(0)
    wrapped, plain = NormInCheckpoint(), NormInCheckpoint(wrapped=False)
    plain.load_state_dict(wrapped.state_dict())
    x = torch.randn(4, 6)
    plan = memopt.plan(wrapped, x, progress=False)
    assert [
        n for n in plan.notes if "torch.utils.checkpoint" in n and "norm.num_batches_tracked" in n
    ]
    assert not [n for n in memopt.plan(plain, x, progress=False).notes if "checkpoint" in n]
    plan.apply(wrapped)(x).sum().backward()
    plain(x).sum().backward()
    for (name, found), wanted in zip(
        wrapped.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(found, wanted), name


def test_hooks_run_once_in_a_backward_that_is_differentiated() -> None:
    """On a parameter and on an input, which is a leaf or was computed."""

    def gradients(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
        called: Any = memopt.plan(model, x, progress=False).apply(model) if planned else model
        computed = x * 1.5
        computed.register_hook(lambda g: 2 * g)
        x.register_hook(lambda g: 3 * g)
        model[0].weight.register_hook(lambda g: 5 * g)
        wanted = (model[0].weight, computed, x)
        found = torch.autograd.grad(called(computed).sum(), wanted, create_graph=True)
        sum(one.square().sum() for one in found).backward()  # type: ignore[union-attr]
        return [*(one.detach() for one in found), model[0].weight.grad, x.grad]  # type: ignore[list-item]

    with pytest.warns(UserWarning, match="differentiated itself"):
        found = gradients(planned=True)
    assert all(map(torch.equal, found, gradients(planned=False)))


EACH = torch.eye(12).view(12, 3, 4)
FOR_ALL_ROWS = torch.eye(4).view(4, 1, 4).expand(4, 3, 4)


@pytest.mark.parametrize("batch", [EACH, FOR_ALL_ROWS], ids=["each", "for all rows"])
def test_a_batch_of_backwards_runs_the_original(batch: Tensor) -> None:
    """It failed in torch's words, without a remedy."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    planned = memopt.plan(model, x, progress=False).apply(model)

    def gradients(called: nn.Module) -> tuple[Tensor, ...]:
        wanted = (x, *model.parameters())
        return torch.autograd.grad(called(x), wanted, batch, is_grads_batched=True)

    with pytest.warns(UserWarning, match="for a batch of backwards at once"):
        found = gradients(planned)
    assert all(map(torch.equal, found, gradients(model)))
    model.append(nn.Dropout(0.5))
    planned = memopt.plan(model, x, progress=False).apply(model)
    with pytest.raises(ExecutionError, match=r"draws random numbers.*memopt\.unwrap"):
        gradients(planned)


class TwoResults(Layers):
    """Both results come from one reentrant checkpoint."""

    def both(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.dropout(h, 0.3)
        return self.a(h), self.b(h)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.both, x.square(), use_reentrant=True)


def test_a_backward_from_one_result_of_a_reentrant_checkpoint() -> None:
    plain = TwoResults()
    planned = memopt.wrap(copy.deepcopy(plain), progress=False)
    for step in range(3):
        left = []
        for model in (plain, planned):
            torch.manual_seed(step)
            x = torch.randn(4, 6, requires_grad=True)
            computed = x * 2
            first, second = model(computed)
            (first if step else second).sum().backward()
            left.append([x.grad, *(one.grad for one in model.parameters()), torch.rand(1)])
        assert all(one is not None for one in left[0])
        assert all(map(torch.equal, *left))

"""Several threads train through planned modules of one capture at once."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.executor.harness import prepare
from tests.executor.test_steps import Model, batch


def test_threads() -> None:
    """Two threads share one planned module; with dropout off, so that order does not matter."""

    class Quiet(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)).tanh())

    model = Quiet()
    own = prepare(model, torch.randn(4, 6))
    modules = [own.planned(name) for name in ("recompute_late", "swap_all")]
    inputs = [batch(i) for i in range(8)]
    weights = list(model.parameters())
    expected = [torch.autograd.grad(model(x).square().sum(), weights) for x in inputs]
    wrong: list[int] = []

    def work(module: nn.Module) -> None:
        for _ in range(20):
            for i, x in enumerate(inputs):
                found = torch.autograd.grad(module(x).square().sum(), weights)
                if not all(map(torch.equal, found, expected[i])):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(module,)) for module in modules * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert own.waiting == 0


def test_threads_replay_their_own_random_numbers() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x * self.weight, 0.5).clone()

    model, x = Noise(), torch.ones(64, requires_grad=True)
    module = prepare(model, (x,)).planned("recompute_late")
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(200):
            y = module(x.detach().requires_grad_())
            (gradient,) = torch.autograd.grad(y.sum(), [model.weight])
            if not torch.equal(gradient, y.detach()):
                wrong.append(gradient)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

"""Forwards that set a buffer of a module that they reach through a global."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import memopt

NEURONS: list[Neuron] = []


class Neuron(nn.Module):
    """Keeps its state in a buffer, and itself in a list of all neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(3, 4))
        NEURONS.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state * 0.5 + self.linear(x)
        return self.state


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.neuron = Neuron()

    def forward(self, x: Tensor) -> Tensor:
        for one in NEURONS:
            one.state = torch.zeros_like(one.state)
        return self.neuron(x) + self.neuron(x * 2)


def test_steps_are_eagers() -> None:
    """Planning ended with a NameError of Python's."""
    eager, model = Network(), Network()
    NEURONS.remove(eager.neuron)
    memopt.wrap(model, "min", "rotor", cache=False, progress=False)
    for _ in range(3):
        x = torch.randn(3, 4)
        for one in (eager, model):
            NEURONS[:] = [one.neuron]
            one.zero_grad()
            one(x).square().sum().backward()
        assert torch.equal(model.neuron.state, eager.neuron.state)
        for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad, expected.grad)

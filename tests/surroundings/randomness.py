"""Random numbers: of Python, of NumPy, of torch and of generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.surroundings.situation import Net, Setting, situation

SEEN: list[Any] = []
NUMPY = np.random.default_rng(0)
GENERATOR = torch.Generator()


class Skipping(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h if random.random() < 0.5 else h.sin()


@situation("stochastic depth by random.random()", r"random\.random|random")
def _() -> Setting:
    return Setting(Skipping())


class Scaling(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h * random.uniform(0.5, 1.5)


@situation("random.uniform scales", "random")
def _() -> Setting:
    return Setting(Scaling())


class NumpySkipping(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h if np.random.rand() < 0.5 else h.sin()


@situation("stochastic depth by np.random", "np.random|numpy|NumPy|random")
def _() -> Setting:
    return Setting(NumpySkipping())


class Mixing(Net):
    def touch(self, h: Tensor) -> Tensor:
        rate = float(np.random.beta(1.0, 1.0))
        return rate * h + (1 - rate) * h.flip(0)


@situation(
    "mixup by np.random.beta",
    "beta|numpy|NumPy|random",
    torchs="what comes before a graph has run when that is refused",
)
def _() -> Setting:
    return Setting(Mixing())


class NumpyArray(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(np.random.rand(8)).float()


@situation("an array of np.random", "numpy|NumPy|random")
def _() -> Setting:
    return Setting(NumpyArray())


class NumpySeeding(Net):
    def touch(self, h: Tensor) -> Tensor:
        np.random.seed(7)
        return h


@situation("np.random.seed in the forward", "numpy|NumPy|seed")
def _() -> Setting:
    return Setting(NumpySeeding())


class OwnNumpy(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h * float(NUMPY.random())


@situation(
    "a NumPy generator of one's own",
    "NUMPY|numpy|NumPy|Generator|random",
    torchs="what comes before a graph has run when that is refused",
)
def _() -> Setting:
    global NUMPY
    NUMPY = np.random.default_rng(0)
    return Setting(OwnNumpy(), lambda: repr(NUMPY.bit_generator.state))


class Shuffling(Net):
    def touch(self, h: Tensor) -> Tensor:
        order = list(range(h.shape[0]))
        random.shuffle(order)
        return h + h[order]


@situation("random.shuffle permutes", "shuffle|random")
def _() -> Setting:
    return Setting(Shuffling())


class OwnGenerator(Net):
    def touch(self, h: Tensor) -> Tensor:
        return h + torch.randn(h.shape, generator=GENERATOR)


@situation("a torch.Generator of one's own", "[Gg]enerator", quick=True)
def _() -> Setting:
    GENERATOR.manual_seed(0)
    return Setting(OwnGenerator(), lambda: GENERATOR)


class GivenGenerator(Net):
    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(x.shape, generator=generator)
        y: Tensor = self.last(torch.tanh(self.first(x + noise)))
        return y


@situation("a torch.Generator as argument", "[Gg]enerator")
def _() -> Setting:
    generator = torch.Generator().manual_seed(0)
    return Setting(GivenGenerator(), lambda: generator, inputs=lambda _: (generator,))


class Noisy(Net):
    def touch(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5, self.training) + 0.1 * torch.randn_like(h)


@situation("dropout and noise", "random|dropout", exact=("plan", "wrap", "train_step"), quick=True)
def _() -> Setting:
    return Setting(Noisy())


class Seeding(Net):
    def touch(self, h: Tensor) -> Tensor:
        torch.manual_seed(7)
        return h + torch.randn(h.shape)


@situation("torch.manual_seed in the forward", "manual_seed|seed")
def _() -> Setting:
    return Setting(Seeding())


class Forking(Net):
    def touch(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return h + torch.randn(h.shape)


@situation("fork_rng in the forward", "fork_rng|random|rng|seed")
def _() -> Setting:
    return Setting(Forking())

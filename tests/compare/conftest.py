"""A chain and its comparison."""

from __future__ import annotations

from random import Random

import pytest

import memopt
from memopt import Chain, Comparison
from memopt.models.generate import random_chain


@pytest.fixture(scope="module")
def chain() -> Chain:
    return random_chain(Random(5), 9)


@pytest.fixture(scope="module")
def table(chain: Chain) -> Comparison:
    return memopt.compare(chain, progress=False)

"""Random modules under every strategy; `python -m tests.fuzz sweep` runs more of them."""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.sweeps.grammar import random_module
from tests.sweeps.modules import Found, compare, every_plan, sweep_module

QUICK = ("store-all", "rotor", "olla")
"""One that only keeps, one that recomputes, one that reorders and places."""


def _check(seed: int, strategies: tuple[str, ...], limit_s: float) -> Found:
    made = random_module(seed)
    found = sweep_module(seed, made, every_plan(strategies, limit_s))
    assert not found.wrong, (found.wrong[:5], made.source)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_random_modules(seed: int) -> None:
    found = _check(seed, QUICK, 5.0)
    assert found.ran, found.refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 10))
def test_random_modules_under_every_strategy(first: int) -> None:
    ran = [_check(seed, tuple(memopt.strategies()), 1.0).ran for seed in range(first, first + 10)]
    assert sum(map(bool, ran)) >= 9, "hardly anything was planned"


def test_modules_are_equal_for_equal_seeds() -> None:
    assert random_module(3).source == random_module(3).source != random_module(4).source


def test_results_of_one_element_are_compared_whatever_their_strides() -> None:
    one, other = torch.ones(1, 6)[:, :1], torch.zeros(1, 6)[:, :1]
    strided = torch.ones(4).as_strided((1,), (3,))
    found = Found()
    compare({"a": one, "b": strided}, {"a": one.clone(), "b": torch.ones(1)}, "differs", "", found)
    assert not found.wrong
    compare({"a": one, "b": strided}, {"a": other, "b": -strided}, "differs", "", found)
    assert found.wrong == [("", "differs: a by 1.0e+00 (and 1 more)")]


def test_not_a_number_is_compared_without_its_sign() -> None:
    """IEEE 754 leaves it open; where it stands, and all else, is compared."""
    nan, found = torch.tensor([torch.nan, 1.0]), Found()
    for other in (-nan + torch.tensor([0.0, 2.0]), torch.tensor([-torch.nan, 1.0])):
        assert other.isnan()[0]
        compare({"a": nan, "b": nan * 1j}, {"a": other, "b": other * 1j}, "differs", "", found)
    assert not found.wrong
    compare({"a": nan}, {"a": nan.flip(0)}, "differs", "", found)
    compare({"a": nan}, {"a": torch.tensor([torch.nan, -1.0])}, "differs", "", found)
    assert len(found.wrong) == 2

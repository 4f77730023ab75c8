"""Every strategy on random tiny graphs and chains, against exhaustive search."""

from __future__ import annotations

import pytest

from tests.brute_force.sweep import check_chain, check_graph

BLOCK = 50
BLOCKS = [range(seed, seed + BLOCK) for seed in range(0, 2000, BLOCK)]


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 5, 11)),
        *(3, 4, 20, 605, 777, 1046, 1805),
    ],
)
def test_graphs(seed: int) -> None:
    found = check_graph(seed)
    assert not found.wrong, "\n".join(found.wrong)
    assert found.counts["plans"] > 0


def test_a_run_in_another_way_that_reads_less_ends_values_earlier() -> None:
    found = check_graph(688, ("sequential",))
    assert not found.wrong, "\n".join(found.wrong)
    assert found.counts["plans"] > 0


@pytest.mark.parametrize("seed", [*range(4), 127, 346])
def test_chains(seed: int) -> None:
    found = check_chain(seed)
    assert not found.wrong, "\n".join(found.wrong)
    assert found.counts["plans"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seeds", BLOCKS, ids=str)
def test_thousands_of_graphs(seeds: range) -> None:
    wrong = [line for seed in seeds for line in check_graph(seed).wrong]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", BLOCKS, ids=str)
def test_thousands_of_chains(seeds: range) -> None:
    wrong = [line for seed in seeds for line in check_chain(seed).wrong]
    assert not wrong, "\n".join(wrong)

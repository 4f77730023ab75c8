"""Eight equal stages, where many schedules take the same time: the first of them, as ever."""

from __future__ import annotations

import pytest

from memopt.models.chain import Chain, Stage
from memopt.strategies.base import Strategy
from memopt.strategies.rotor import Rotor, RotorFree

PERSISTENT = {
    6: "Fck^1 F∅^2 F∅^3 F∅^4 F∅^5 Fck^6 F∅^7 Fall^8 B^8 Fall^6 Fall^7 B^7 B^6 Fck^1 F∅^2 F∅^3 "
    "Fall^4 Fall^5 B^5 B^4 Fall^1 Fall^2 Fall^3 B^3 B^2 B^1",
    8: "Fall^1 Fck^2 F∅^3 F∅^4 F∅^5 Fall^6 Fall^7 Fall^8 B^8 B^7 B^6 Fall^2 Fall^3 Fall^4 Fall^5 "
    "B^5 B^4 B^3 B^2 B^1",
}
FREE = {
    6: "Fck^1 F∅^2 F∅^3 Fall^4 drop a^3 Fck^5 F∅^6 Fall^7 drop a^6 Fall^8 B^8 Fck^5 Fall^6 "
    "drop a^5 B^7 Fall^5 B^6 B^5 Fall^1 Fck^2 Fall^3 drop a^2 B^4 Fall^2 B^3 B^2 B^1",
    8: "Fall^1 Fall^2 Fck^3 F∅^4 Fall^5 drop a^4 Fck^6 Fall^7 drop a^6 Fall^8 B^8 Fall^6 B^7 B^6 "
    "Fall^3 Fall^4 B^5 B^4 B^3 B^2 B^1",
}


@pytest.mark.parametrize("budget", [6, 8])
@pytest.mark.parametrize(("strategy", "expected"), [(Rotor(), PERSISTENT), (RotorFree(), FREE)])
def test_the_first_of_equals(strategy: Strategy, expected: dict[int, str], budget: int) -> None:
    chain = Chain(1, [Stage(1.0, 1.0, 1, 1, 1) for _ in range(8)])
    assert " ".join(map(str, strategy.solve(chain, budget).steps)) == expected[budget]

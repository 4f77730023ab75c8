"""Linearize on large graphs."""

from __future__ import annotations

from memopt.reductions.linearize import linearize
from tests.models.training_graphs import random_training_graph


def test_five_thousand_operators() -> None:
    """Near-linear: ten times the operators take about ten times the steps of Python."""
    import sys

    def calls(layers: int) -> int:
        graph = random_training_graph(1, layers)
        count = 0

        def count_calls(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_calls)
        try:
            linearize(graph)
        finally:
            sys.setprofile(None)
        return count

    assert calls(1500) < 20 * calls(150)

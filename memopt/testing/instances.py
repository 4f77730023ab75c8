"""Tiny instances on which strategies are checked, whatever a step may have among them."""

from __future__ import annotations

from random import Random

from memopt.models.generate import random_chain, random_graph
from memopt.models.instances import three_layers
from memopt.strategies.base import CostModel


def tiny_instances() -> dict[str, CostModel]:
    """Name → instance: chains, graphs with random operators and alternatives, a whole step."""
    return {
        "three layers": three_layers(),
        "graph": random_graph(Random(1), 4),
        "graph with alternatives": random_graph(Random(5), 3, implementations=True),
        "whole step": random_graph(Random(4), 2, updates=True),
        "chain": random_chain(Random(8), 4, parameter_gradients=True),
        "chain of one stage": random_chain(Random(2), 1),
    }

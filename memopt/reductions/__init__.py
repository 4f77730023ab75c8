"""Reductions between problems: graph to chain and back, and graph to smaller graph. No torch."""

from memopt.models.chain import Chain as _Chain
from memopt.models.graph import Graph as _Graph
from memopt.reductions.linearize import linearize as _linearize


def _chain_of(graph: _Graph) -> _Chain:
    """Make the chain of a graph's articulation points."""
    return _linearize(graph).chain


_Graph.linearizer = _chain_of

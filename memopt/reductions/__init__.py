"""From graphs to chains and back, and to smaller graphs. No torch."""

from memopt.models.graph import linearize_with as _linearize_with
from memopt.reductions.linearize import linearize as _linearize

_linearize_with(lambda graph: _linearize(graph).chain)

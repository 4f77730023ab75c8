"""The tables of a cost model that a page refers to: tensors, modules, operators, their runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memopt.models.graph import Graph, Phase, TensorKind
from memopt.models.variants import variant
from memopt.programs.instructions import Compute
from memopt.report.memory_profile import LAYERS, layer_of
from memopt.report.module_rows import depth_for, group_of

MOST_GROUPS = 40
"""How many rows the table of modules has at most."""
_PHASES = tuple(Phase)


class GraphTables:
    """One cost model, column by column. Ways to run an operator are added as programs use them."""

    def __init__(self, graph: Graph, texts: Mapping[int, str]) -> None:
        self.graph = graph
        self._texts = texts
        paths = [_module_of(graph, tensor) for tensor in range(len(graph.tensors))]
        owners = [operator.module for operator in graph.operators]
        depth = depth_for((*owners, *paths), MOST_GROUPS)
        self.groups = tuple(dict.fromkeys(group_of(path, depth) for path in (*owners, *paths)))
        number = {name: index for index, name in enumerate(self.groups)}
        self.group_of_tensor = tuple(number[group_of(path, depth)] for path in paths)
        self.group_of_operator = tuple(number[group_of(path, depth)] for path in owners)
        self._modules = tuple(dict.fromkeys((*owners, *paths)))
        at = {path: index for index, path in enumerate(self._modules)}
        self._paths = tuple(at[path] for path in paths)
        self._owners = tuple(at[path] for path in owners)
        self._runs: dict[tuple[int, str | None], int] = {}

    def run(self, instruction: Compute) -> int:
        """Return the number of a way to run an operator; a new one is added."""
        return self._runs.setdefault((instruction.op, instruction.implementation), len(self._runs))

    def rows(self) -> dict[str, Any]:
        """Return the tables as the page reads them: bytes, seconds and indices."""
        graph = self.graph
        chosen = [variant(graph.operators[op], how) for op, how in self._runs]
        return {
            "groups": list(self.groups),
            "modules": list(self._modules),
            "tensors": {
                "name": [tensor.name for tensor in graph.tensors],
                "bytes": [tensor.size_bytes for tensor in graph.tensors],
                "layer": [LAYERS.index(layer_of(graph, t)) for t in range(len(graph.tensors))],
                "kind": [str(tensor.kind) for tensor in graph.tensors],
                "module": list(self._paths),
                "group": list(self.group_of_tensor),
                "text": [self._texts.get(t, "") for t in range(len(graph.tensors))],
                "producer": [graph.producer.get(t, -1) for t in range(len(graph.tensors))],
            },
            "extra_resident_bytes": graph.extra_resident_bytes,
            "boundary_bytes": graph.boundary_bytes,
            "operators": {
                "name": [operator.name for operator in graph.operators],
                "target": [operator.target for operator in graph.operators],
                "module": list(self._owners),
                "group": list(self.group_of_operator),
                "phase": [_PHASES.index(operator.phase) for operator in graph.operators],
            },
            "runs": {
                "op": [op for op, _ in self._runs],
                "implementation": [how or "" for _, how in self._runs],
                "time_s": [
                    # Collectives and updates on the host take no compute time.
                    0.0 if graph.operators[op].collective or one.on_host else one.time_s
                    for (op, _), one in zip(self._runs, chosen, strict=True)
                ],
                "workspace_bytes": [0 if one.on_host else one.workspace_bytes for one in chosen],
                "reads": [list(dict.fromkeys(one.reads)) for one in chosen],
                "writes": [list(one.writes) for one in chosen],
            },
        }


def _module_of(graph: Graph, tensor: int) -> str:
    """Return the module whose operator writes a tensor, or whose parameter or buffer it is."""
    producer = graph.producer.get(tensor)
    if producer is not None:
        return graph.operators[producer].module
    if graph.tensors[tensor].kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
        return graph.tensors[tensor].name.rpartition(".")[0]
    return ""

"""OLLA's equations 1 to 9, 13 and 14 as they are printed, for tiny graphs: an oracle.

Every variable for every tensor, pair and step; no windows, no precedence, no hints, big M. What the
paper does not say: operators have a C of their own (those without results would never run), the
step's results are read by a last node, and what has no address (workspace, tangents) is counted
beside the addresses. Precedence that no tensor implies is read off the list of all orders.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, Free
from tests.passes.oracles import all_orders


@dataclass(frozen=True)
class Edge:
    """A tensor, or without bytes a control edge."""

    size: int
    source: int
    sinks: frozenset[int]
    placed: bool = True


@dataclass(frozen=True)
class Network:
    """The DAG of OLLA §3.1: nodes 0..n-1 with their workspaces, the last of which ends the step."""

    workspaces: tuple[int, ...]
    edges: tuple[Edge, ...]


def network_of(graph: Graph) -> Network:
    """Make the DAG of one run of every operator, each result in a storage of its own."""
    orders = [
        [x.op if isinstance(x, Compute) else -1 for x in program if not isinstance(x, Free)]
        for program in all_orders(graph)
    ]
    names = sorted(orders[0])
    nodes, last = {name: node for node, name in enumerate(names)}, len(names)
    positions = [{name: i for i, name in enumerate(order)} for order in orders]
    edges = [
        Edge(0, nodes[a], frozenset([nodes[b]]), False)
        for a, b in itertools.permutations(names, 2)
        if all(position[a] < position[b] for position in positions)
    ]
    edges += [Edge(0, node, frozenset([last]), False) for node in range(last)]
    writes = {nodes[i]: graph.operators[i].writes for i in names if i >= 0}
    if -1 in nodes:
        writes[nodes[-1]] = graph.tangents
    for node, tensors in writes.items():
        for t in tensors:
            sinks = {nodes[i] for i in names if i >= 0 and t in graph.operators[i].reads}
            sinks |= {last} if t in graph.kept else set()
            size = graph.tensors[t].size_bytes
            edges.append(Edge(size, node, frozenset(sinks), t not in graph.tangents))
    workspaces = [
        graph.operators[i].workspace_bytes if i >= 0 else graph.boundary_bytes for i in names
    ]
    return Network((*workspaces, 0), tuple(edges))


class Literal:
    """The equations of one network."""

    def __init__(self, network: Network, *, addresses: bool) -> None:
        """Build eq. 14, or with addresses eq. 9."""
        self.network, self.model = network, cp_model.CpModel()
        n, E = len(network.workspaces), network.edges
        T, V = range(n), range(n)
        model: Any = self.model
        run = [[model.new_bool_var("") for _ in T] for _ in V]
        C = [run[e.source] for e in E]  # eq. 5
        P = [[model.new_bool_var("") for _ in T] for _ in E]
        M = sum(e.size for e in E) + sum(network.workspaces)
        for v in V:
            model.add(sum(run[v]) == 1)  # eq. 3
        for e, edge in enumerate(E):
            for t in T:
                model.add(P[e][t] + C[e][t] <= 1)  # eq. 1
                model.add(P[e][t] <= (P[e][t - 1] + C[e][t - 1] if t else 0))  # eq. 2
                for v in edge.sinks:
                    model.add(run[v][t] <= P[e][t])  # eq. 4
        live = [[C[e][t] + P[e][t] for t in T] for e in range(len(E))]
        placed = [e for e, edge in enumerate(E) if edge.size and edge.placed]
        outside = model.new_int_var(0, M, "outside")
        self.peak = model.new_int_var(0, M, "peak_mem")
        for t in T:
            work = sum(w * run[v][t] for v, w in enumerate(network.workspaces))
            rest = [e for e in range(len(E)) if not (addresses and e in placed)]
            model.add(sum(E[e].size * live[e][t] for e in rest) + work <= outside)  # eq. 13
        if addresses:
            A = {e: model.new_int_var(0, M, "") for e in placed}
            for e in placed:
                model.add(A[e] + E[e].size <= self.peak)  # eq. 8
            for i, j in itertools.combinations(placed, 2):
                a, b = model.new_bool_var(""), model.new_bool_var("")
                model.add(a + b <= 1)
                for t in T:
                    model.add(a + b >= live[i][t] + live[j][t] - 1)  # eq. 6
                model.add(A[i] + E[i].size - A[j] <= (1 - a) * M)  # eq. 7a
                model.add(A[i] - A[j] - E[j].size >= (b - 1) * M)  # eq. 7b
        model.minimize(self.peak + outside)

    def least(self) -> int:
        """Return the optimum, bytes without resident ones."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(self.model) == cp_model.OPTIMAL
        return round(solver.objective_value)


def least_bytes(graph: Graph, *, addresses: bool) -> int:
    """Return the least memory of a graph by eq. 14, or by eq. 9, resident bytes included."""
    return graph.resident_bytes + Literal(network_of(graph), addresses=addresses).least()

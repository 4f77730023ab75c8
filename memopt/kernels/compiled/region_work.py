"""Estimates the work of regions that are not compiled."""

from __future__ import annotations

from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.kernels.compiled.divide import Region
from memopt.pricing.flops import Work, elements, operator_name, touched_bytes, work
from memopt.step.build import Lowering
from memopt.step.region_graph import Subgraph
from memopt.step.signature import describe_value, signature

_LOOKUPS = ("embedding", "gather")
"""Operators that read the first operand only where the second points."""


def region_work(lowering: Lowering, region: Region, one: Subgraph) -> tuple[Work, ...]:
    """Return the work of a fused kernel: one launch, which reads each input and writes each output
    once, and the operations of each operator, in registers.

    Args:
        lowering: of the step before its regions became operators.
        region: of it.
        one: the region as a graph of its own.
    """
    parts = []
    for op in region.operators:
        node = lowering.nodes[op]
        parts.append(work(signature(node), describe_value(node)))
    dtype = next((part.dtype for part in parts if part.dtype), "")
    moved = _read_bytes(one.graph) + sum(
        touched_bytes(describe_value(value)) for value in one.values
    )
    whole = Work("", dtype, 0.0, moved)
    return (whole, *(Work(p.kind, p.dtype, p.operations, 0, calls=0) for p in parts))


def _read_bytes(graph: FxGraph) -> int:
    return sum(_read_of(node) for node in graph.find_nodes(op="placeholder"))


def _read_of(node: Node) -> int:
    """Return the bytes that a kernel reads of an input; of a table, only the rows looked up."""
    given = describe_value(node.meta["val"])
    whole = touched_bytes(given)
    looked_up = 0
    for user in node.users:
        table = operator_name(user.target) in _LOOKUPS and user.args[0] is node
        if not table:
            return whole
        looked_up += elements(describe_value(user.meta["val"])) * given.dtype.itemsize
    return int(min(whole, looked_up))

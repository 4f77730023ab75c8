"""Gives a captured step tiled kernels: `kernels="tiled"` of `memopt.plan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import Node

from memopt.kernels.compiled.divide import Region
from memopt.kernels.compiled.replace import KEPT_META, add_call, with_kernels
from memopt.kernels.tiled.divide import tiling
from memopt.kernels.tiled.kernel import (
    LEAST_ROWS,
    LEAST_ROWS_OF_ACCELERATORS,
    chunks_of,
    peak_bytes,
    rows_of_chunk,
    tiled,
)
from memopt.kernels.tiled.subgraph import ORIGIN, PLACES, taken
from memopt.kernels.tiled.tokens import Axis, Tokens
from memopt.pricing.flops import Work, work
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.fused import Fused
from memopt.step.kernel import FusedKernel
from memopt.step.region_graph import Subgraph
from memopt.step.signature import describe_value, signature
from memopt.torch_private.operators import OpOverload
from memopt.torch_private.operators import aten as _ATEN

TILED = "tiled"
_FORM = "tiled1"
"""Changed when regions run otherwise, since measured costs are stored by key."""


def tiled_step(
    model: nn.Module, captured: Captured, lowering: Lowering, block_bytes: int
) -> tuple[Fused, dict[str, tuple[Work, ...]]]:
    """Replace the regions of a step that work token by token by operators which run in chunks, and
    return the work of each by its key, for an estimate."""
    # The loss of log-probabilities [rows, classes] reads one of each row: gathered into [rows, 1],
    # row by row, and the loss of a single class, they are the same numbers, added up in the same
    # order. Losses with weights of classes, or whose ignored class is 0, stay.
    graph = captured.module.graph
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=_ATEN.nll_loss_forward.default)
        if _gathered(node)
    ]
    lowering = build(model, captured, block_bytes) if found else lowering
    tokens = Tokens(lowering)
    order = {node: i for i, node in enumerate(captured.module.graph.nodes)}
    least = LEAST_ROWS_OF_ACCELERATORS if block_bytes > 1 else LEAST_ROWS
    calls, works = [], {}
    for region, axis, one in taken(lowering, tokens, tiling(lowering, tokens, 2 * least), order):
        rows = rows_of_chunk(one, axis.counts, least)
        count = len(chunks_of(axis.counts, rows))
        kernel = _kernel(one, axis, rows, count)
        calls.append((region, replace(one, key=kernel.key), kernel))
        works[kernel.key] = tuple(_works(one, count))
    if calls:
        captured = with_kernels(captured, lowering, calls)
        lowering = build(model, captured, block_bytes)
    return Fused(captured, lowering, _notes(calls), TILED), works


def without_choice(
    kernels: str, model: nn.Module, captured: Captured, lowering: Lowering, block_bytes: int
) -> tuple[Fused, dict[str, tuple[Work, ...]]] | None:
    """Give a step torch's own kernels or tiled ones, which take neither measuring nor a compiler;
    None: other ones are asked for. See `tiled_step`."""
    if kernels == "aten":
        return Fused(captured, lowering), {}
    return tiled_step(model, captured, lowering, block_bytes) if kernels == TILED else None


def _kernel(one: Subgraph, axis: Axis, rows: int, count: int) -> FusedKernel:
    sequences, length = axis.counts
    run = tiled(one, axis.counts, rows)
    key = f"{_FORM}_{one.key}_{sequences}x{length}by{rows}"
    return FusedKernel(key, run, one.graph, peak_bytes(one.graph, 1 / count))


def _works(one: Subgraph, count: int) -> Iterable[Work]:
    """Yield the work of a region's calls, each made once for every chunk."""
    for node in one.graph.nodes:
        called = node.op == "call_function" and isinstance(node.target, OpOverload)
        if called and not getattr(node.target, "is_view", False):
            origin = node.meta[ORIGIN]
            done = work(signature(origin), describe_value(origin))
            yield replace(done, calls=done.calls * count)
    for node in one.graph.output_node().all_input_nodes:
        if not any(node.meta[PLACES][0]):
            yield Work("", "", 0.0, 2 * 4 * node.meta["val"].numel() * count, calls=count)


def _notes(calls: list[tuple[Region, Subgraph, FusedKernel]]) -> tuple[str, ...]:
    if not calls:
        return ("No operators work token by token on enough tokens: nothing is tiled.",)
    summed = sum(
        not any(node.meta[PLACES][0])
        for _, one, _ in calls
        for node in one.graph.output_node().all_input_nodes
    )
    note = f"{len(calls)} regions run on some tokens at a time."
    if summed:
        note += (
            f" They add up {summed} gradients of parameters chunk by chunk, which rounds otherwise "
            "than eager's sums over all tokens; all else is computed row by row as there."
        )
    return (note,)


def _gathered(node: Node) -> bool:
    logs, target, weights, _, ignored = node.args
    given = logs.meta["val"]  # type: ignore[union-attr]
    if weights is not None or ignored == 0 or given.dim() != 2 or given.shape[1] == 1:
        return False

    def make(call: Any, *args: Any) -> Node:
        one = add_call(node.graph, given.fake_mode, call, *args)
        one.meta |= {key: node.meta[key] for key in KEPT_META if key in node.meta}
        return one

    with node.graph.inserting_before(node):
        counted = make(_ATEN.ne.Scalar, target, ignored)
        named = make(_ATEN.where.ScalarOther, counted, target, 0)
        index = make(_ATEN.unsqueeze.default, named, 1)
        picked = make(_ATEN.gather.default, logs, 1, index)
        single = make(_ATEN.where.ScalarSelf, counted, 0, target)
    node.args = (picked, single, *node.args[2:])
    return True

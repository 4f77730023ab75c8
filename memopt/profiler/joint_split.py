"""The two halves of a joint graph, and how AOTAutograd is made to run programs in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError
from memopt.profiler import torch_private

Boxed = Callable[[list[Any]], Any]
"""A callable that takes its arguments as one list, which it may empty."""


@dataclass(frozen=True)
class Split:
    """Which nodes of a joint graph are what."""

    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    descriptors: tuple[Any, ...]
    output: Node


def split_joint(module: GraphModule) -> Split:
    """Tell the nodes of a joint graph apart by AOTAutograd's descriptors."""
    descriptors = torch_private.descriptor_types()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    tangents = tuple(
        n for n in placeholders if isinstance(n.meta.get("desc"), descriptors.TangentAOTInput)
    )
    primals = tuple(n for n in placeholders if n not in tangents)
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    results = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    count = len(results) - len(primals)
    return Split(
        primals=primals,
        tangents=tangents,
        forward_outputs=tuple(results[:count]),
        gradients=tuple(results[count:]),
        descriptors=tuple(output.meta["desc"])[:count],
        output=output,
    )


def mutations(split: Split) -> tuple[int, ...]:
    """For each leading forward output, the index of the primal it updates."""
    by_descriptor = {repr(n.meta["desc"]): i for i, n in enumerate(split.primals)}
    mutated = []
    for descriptor in split.descriptors:
        if type(descriptor).__name__ != "InputMutationAOTOutput":
            break
        mutated.append(by_descriptor[repr(descriptor.mutated_input)])
    return tuple(mutated)


def compiler(find: Callable[[], Boxed | None]) -> Callable[..., Boxed]:
    """A compiler for AOTAutograd whose callable runs what `find` gives at each call."""

    def compile_(graph_module: GraphModule, inputs: Any) -> Boxed:
        def run(args: list[Any]) -> Any:
            target = find()
            if target is None:
                raise RuntimeError("memopt: no program is installed in this captured model")
            return target(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's own marker
        return run

    return compile_


def partitioner(split: Split) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """A partition whose only saved value is a 0-d token; the real work runs in `hooks`."""

    def stand_in(graph: FxGraph, node: Node) -> Node:
        empty = graph.call_function(torch.ops.aten.empty.memory_format, ([],))
        empty.meta = dict(node.meta)
        return empty

    def partition(
        joint: GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        if num_fwd_outputs != len(split.forward_outputs):
            raise CaptureError(
                f"AOTAutograd counts {num_fwd_outputs} forward outputs, memopt "
                f"{len(split.forward_outputs)}; please report this model"
            )
        values: list[Any] = [n.meta.get("val") for n in split.primals]
        fake_mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        forward = FxGraph()
        copies = {n: forward.node_copy(n) for n in split.primals}
        outputs = [
            (copies[o] if o in copies else stand_in(forward, o)) if isinstance(o, Node) else o
            for o in split.forward_outputs
        ]
        token = forward.call_function(torch.ops.aten.empty.memory_format, ([],))
        with fake_mode:
            token.meta["val"] = torch.empty((), dtype=torch.int64, device="cpu")
        result = forward.output((*outputs, token))
        result.meta = dict(split.output.meta)
        result.meta["desc"] = [*split.descriptors, None]

        backward = FxGraph()
        backward.placeholder("token").meta["val"] = token.meta["val"]
        tangents = {n: backward.node_copy(n) for n in split.tangents}
        gradients = [
            (tangents[g] if g in tangents else stand_in(backward, g)) if isinstance(g, Node) else g
            for g in split.gradients
        ]
        result = backward.output(tuple(gradients))
        result.meta = dict(split.output.meta)
        result.meta["desc"] = list(split.output.meta["desc"])[num_fwd_outputs:]
        return GraphModule(joint, forward), GraphModule(joint, backward)

    return partition

"""Splits AOTAutograd's joint graph, shapes its gradients, and runs programs in its place.

Gradients are returned in the memory layout in which autograd keeps them. It keeps a leaf's gradient
in the leaf's own layout, or row-major if the leaf has gaps. A gradient in another layout (expanded
by `sum`, transposed, of a sliced input) it copies, after the backward and past any plan. Traced
here, the copy is planned, and its source freed after it.

A parameter that the forward updates in place (`nn.Embedding(max_norm=...)`) is updated without
autograd's knowledge, so the gradient of its new value is zero; AOTAutograd adds it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from memopt.errors import CaptureError
from memopt.step.inputs import Call
from memopt.step.memory_layout import is_dense
from memopt.torch_private import pytree
from memopt.torch_private.aot import FakeTensor, boxed, descriptor_types

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default

Boxed = Callable[[list[Any]], Any]
"""Callable that takes its arguments as one list, which it may empty."""


@dataclass(frozen=True)
class Split:
    """The nodes of a joint graph by their roles.

    Attributes:
        gradients: one for each of `primals`; None: it has no gradient.
        given: positions of the primals whose gradients are outputs of the graph. A frozen DTensor
            is two inputs, its shard and its mesh, and has one output, None, in place of a gradient.
    """

    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    descriptors: tuple[Any, ...]
    output: Node
    given: tuple[int, ...]


def split_joint(module: GraphModule) -> Split:
    """Split the nodes of a joint graph by AOTAutograd's descriptors."""
    descriptors = descriptor_types()
    placeholders = module.graph.find_nodes(op="placeholder")
    tangents = tuple(
        n for n in placeholders if isinstance(n.meta.get("desc"), descriptors.TangentAOTInput)
    )
    primals = tuple(n for n in placeholders if n not in tangents)
    output: Any = module.graph.output_node()
    results = list(output.args[0])
    # Without a backward there are no gradients.
    given = _given(primals, output.meta["desc"]) if tangents else ()
    count = len(results) - len(given)
    gradients: list[Any] = [None] * len(primals)
    for position, gradient in zip(given, results[count:], strict=True):
        gradients[position] = gradient
    return Split(
        primals=primals,
        tangents=tangents,
        forward_outputs=tuple(results[:count]),
        gradients=tuple(gradients),
        descriptors=tuple(output.meta["desc"])[:count],
        output=output,
        given=given,
    )


def described(node: Node) -> tuple[Any, str]:
    """Return AOTAutograd's descriptor of an input, and its part of a DTensor ("": not one)."""
    descriptor = node.meta["desc"]
    if type(descriptor).__name__ == "SubclassGetAttrAOTInput":
        return descriptor.base, descriptor.attr
    return descriptor, ""


def _given(primals: Sequence[Node], descriptors: Sequence[Any]) -> tuple[int, ...]:
    """Return positions of the inputs for which a joint graph outputs a gradient, or None for
    one."""
    bases = [getattr(n.meta.get("desc"), "base", None) for n in primals]
    parts: list[Any] = [getattr(d, "base", None) for d in descriptors]
    whole = {repr(part.grad_of) for part in parts if hasattr(part, "grad_of")}
    found = []
    for position, base in enumerate(bases):
        first = position == 0 or base is None or repr(base) != repr(bases[position - 1])
        if first or repr(base) in whole:
            found.append(position)
    return tuple(found)


def mutations(split: Split) -> tuple[int, ...]:
    """Return for each leading forward output the index of the primal it updates."""
    by_descriptor = {repr(n.meta["desc"]): i for i, n in enumerate(split.primals)}
    mutated = []
    for descriptor in split.descriptors:
        if type(descriptor).__name__ != "InputMutationAOTOutput":
            break
        mutated.append(by_descriptor[repr(descriptor.mutated_input)])
    return tuple(mutated)


def compiler(find: Callable[[], Boxed | None]) -> Callable[..., Boxed]:
    """Make a compiler for AOTAutograd whose callable runs what `find` returns at each call."""

    def compile_(graph_module: GraphModule, inputs: Any) -> Boxed:
        def run(args: list[Any]) -> Any:
            target = find()
            if target is None:
                raise RuntimeError("memopt: no program is installed in this captured model")
            return target(args)

        return boxed(run)

    return compile_


def partitioner(split: Split) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """Make a partition whose only saved value is a 0-d token; the real work runs in `hooks`."""

    def fill(graph: FxGraph, inputs: Iterable[Node], results: Iterable[Any]) -> list[Any]:
        """Give a graph these inputs, and empty tensors in place of its results."""
        made = {node: graph.node_copy(node) for node in inputs}
        for node in results:
            if isinstance(node, Node) and node not in made:
                made[node] = graph.call_function(torch.ops.aten.empty.memory_format, ([],))
                made[node].meta = dict(node.meta)
        return [made[one] if isinstance(one, Node) else one for one in results]

    def end(graph: FxGraph, results: Iterable[Any], descriptors: Iterable[Any]) -> None:
        graph.output(tuple(results)).meta = {**split.output.meta, "desc": list(descriptors)}

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
        forward, backward = FxGraph(), FxGraph()
        outputs = fill(forward, split.primals, split.forward_outputs)
        token = forward.call_function(torch.ops.aten.empty.memory_format, ([],))
        with fake_mode:
            token.meta["val"] = torch.empty((), dtype=torch.int64, device="cpu")
        end(forward, (*outputs, token), (*split.descriptors, None))

        backward.placeholder("token").meta["val"] = token.meta["val"]
        given = [split.gradients[i] for i in split.given]
        gradients = fill(backward, split.tangents, given)
        end(backward, gradients, split.output.meta["desc"][num_fwd_outputs:])
        return GraphModule(joint, forward), GraphModule(joint, backward)

    return partition


def _updated_parameter(tangent: Node) -> bool:
    """Return whether a tangent belongs to the new value of a parameter."""
    return type(_updated_input(tangent)).__name__ == "ParamAOTInput"


def _updated_input(tangent: Node) -> Any:
    """Return the descriptor of the input whose new value a tangent belongs to; None: an
    output's."""
    return getattr(getattr(tangent.meta.get("desc"), "output", None), "mutated_input", None)


def without_zero_gradients(module: GraphModule) -> None:
    """Make a joint graph, in place, add no tangent of a parameter's new value to the parameter's
    gradient.

    A forward that changes a parameter (`nn.Embedding(max_norm=...)`) has the new value among its
    results; eager's loss gives that no gradient.
    """
    output: Any = module.graph.output_node()
    for tangent in filter(_updated_parameter, module.graph.find_nodes(op="placeholder")):
        for user in list(tangent.users):
            others = [a for a in user.args if a is not tangent]
            if user.target is torch.ops.aten.add.Tensor and not user.kwargs and len(others) == 1:
                user.replace_all_uses_with(others[0])
                module.graph.erase_node(user)
        output.args = pytree.tree_map(
            lambda result, t=tangent: None if result is t else result, output.args
        )


def without_unread_statistics(module: GraphModule) -> None:
    """Remove the running statistics from the arguments of batch norm's backward in training mode,
    which does not read them: AOTAutograd passes the new ones, which would be kept until then.
    CUDA's kernel checks their dtype: on CUDA they stay if it differs from the input's."""
    for node in module.graph.find_nodes(op="call_function", target=_BATCH_NORM_BACKWARD):
        statistics, train = node.args[3:5], node.args[7]
        if not train or None in statistics:
            continue
        read, mean = node.args[1].meta["val"], statistics[0].meta["val"]
        if read.device.type == "cpu" or read.dtype == mean.dtype:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def of_the_loss(tangents: Iterable[Node]) -> tuple[Node, ...]:
    """Return a whole step's tangents without those of updated parameters that nothing reads."""
    return tuple(t for t in tangents if t.users or not _updated_parameter(t))


def loss_tangents(tangents: Iterable[Node], gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return the tangents with which the backward of a whole step begins: the loss's gradient, and
    0 for values that the forward has given to parameters and inputs."""
    return [
        torch.zeros_like(gradient).expand(tuple(tangent.meta["val"].shape))
        if _updated_input(tangent) is not None
        else gradient
        for tangent in tangents
    ]


def gradients_as_kept(module: GraphModule, call: Call) -> None:
    """Make a joint graph return each leaf's gradient as autograd keeps it, in place.

    Args:
        module: the joint graph.
        call: tells which inputs are leaves. The gradients of other inputs are passed on unchanged.
    """
    split = split_joint(module)
    if not split.tangents:
        return  # There is no backward.
    kept: dict[int, Node] = {}
    for position, (primal, gradient) in enumerate(zip(split.primals, split.gradients, strict=True)):
        if isinstance(gradient, Node) and _is_leaf(primal, call):
            like = primal.meta["val"]
            if not isinstance(like, torch.Tensor):
                # A DTensor's mesh is also an input, and with its gradient an output, of the graph:
                # as an attribute of the graph if another model has the mesh, too.
                if _is_mesh_of(module, gradient, like):
                    kept[position] = primal
            elif not _keeps(gradient.meta["val"], like):
                kept[position] = _copy(module, split.output, gradient, like)
    if not kept:
        return
    gradients = [kept.get(i, split.gradients[i]) for i in split.given]
    split.output.args = ([*split.forward_outputs, *gradients],)
    module.recompile()


def _is_mesh_of(module: GraphModule, node: Node, like: Any) -> bool:
    """Return whether an attribute of the graph is the object that an input is traced as."""
    held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return held is not None and getattr(held, "real_obj", held) == getattr(like, "real_obj", like)


def _is_leaf(primal: Node, call: Call) -> bool:
    descriptor = primal.meta["desc"]
    if type(descriptor).__name__ != "PlainAOTInput":
        return True
    leaf = call.leaves[descriptor.idx]
    return isinstance(leaf, torch.Tensor) and leaf.is_leaf


def _keeps(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether autograd keeps a gradient of this layout as it is."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return True
    if not is_dense(leaf.shape, leaf.stride()):
        return gradient.is_contiguous()
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in strides)


def _copy(module: GraphModule, output: Node, gradient: Node, leaf: torch.Tensor) -> Node:
    """Copy the gradient row-major, in the order of the leaf's dimensions in memory."""
    order = list(range(leaf.dim()))
    if is_dense(leaf.shape, leaf.stride()):
        order.sort(key=lambda d: (leaf.stride(d), leaf.shape[d]), reverse=True)
    back = sorted(range(len(order)), key=order.__getitem__)

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = module.graph.call_function(target, args, kwargs)
        given, named = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node

    with module.graph.inserting_before(output):
        rows = call(torch.ops.aten.permute.default, gradient, order)
        rows = call(torch.ops.aten.clone.default, rows, memory_format=torch.contiguous_format)
        return call(torch.ops.aten.permute.default, rows, back)

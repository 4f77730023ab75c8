"""Tells which operators a captured graph's nodes call, and from which of the user's modules."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memopt.step.kernel import FusedKernel
from memopt.step.operators import RUN_ONCE, Substitute
from memopt.torch_private import pytree
from memopt.torch_private.modules import COMPILED_CALL
from memopt.torch_private.operators import OpOverload, aten

_NEVER_DRAWS = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu.default"})
"""Operators tagged as random, like their relatives, that refuse any dropout."""

_BATCH_NORM_TRAINING_ARGUMENT = {
    "aten._native_batch_norm_legit_functional.default": 5,
    "aten._batch_norm_with_update_functional.default": None,
}

CHECKPOINT = "tag_activation_checkpoint"
"""Name of what calls a checkpoint in Dynamo's graph."""
CHECKPOINTED = "ac_graph_id"
"""Torch's key in the `meta` of nodes that a checkpoint recomputes."""
REENTRANT = -1
"""Its value, in Dynamo's graph itself, of those of a reentrant checkpoint."""
ANY_OFFSET = "any_offset"
"""Key in the meta of views whose fake value starts where its root does, wherever they start."""
HOST_RESULTS: dict[Any, tuple[int, ...]] = (
    {}
    if torch.version.hip
    else {
        aten._scaled_dot_product_efficient_attention.default: (2, 3),
        aten._efficient_attention_forward.default: (2, 3),
        aten._scaled_dot_product_cudnn_attention.default: (6, 7),
        aten._cudnn_attention_forward.default: (6, 7),
    }
)
"""Operator → results that an accelerator's kernel leaves on the host. Attention kernels draw their
dropout's seed and offset there, unless a CUDA graph is captured, and their backward follows these
addresses (attention.cu, note "Seed and Offset Device"; on ROCm all is on the device)."""


inputs_of = operator.attrgetter("all_input_nodes")
"""Return the nodes that a node is given."""


def is_reentrant(given: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with these keyword arguments is reentrant."""
    return given.get("use_reentrant") is not False


def is_random(node: Node) -> bool:
    """Return whether the node draws random numbers."""
    target = overload_of(node)
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and (torch.Tag.nondeterministic_seeded in target.tags or target in RUN_ONCE)
        and str(target) not in _NEVER_DRAWS
    )


def ancestors(node: Node, read_by: Callable[[Node], Iterable[Node]] = inputs_of) -> set[Node]:
    """Return a node, and all that it is computed from; `read_by` tells what a node reads."""
    found, waiting = {node}, [node]
    while waiting:
        for source in read_by(waiting.pop()):
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def overload_of(node: Node) -> Any:
    """Return a node's target; for memopt's own form of an operator, the operator."""
    target = node.target
    return target.function if isinstance(target, Substitute) else target


def tensors_of(*nodes: Node) -> list[torch.Tensor]:
    """Return the (fake) tensors that nodes return."""
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [value for value in values if isinstance(value, torch.Tensor)]


_ROOT = re.compile(r"^L\['self'\]\.?|^L__self___?|_export_root\.?")
# A class with a `__getattr__` of its own (PEFT's) is read by its dictionary, and a wrapped model
# through the object that plans its calls (`SelfPlanning.model`).
_REGISTRY = re.compile(
    rf"__dict__\[['\"]_modules['\"]\]|_modules|{COMPILED_CALL}\.__self__\.model\b"
)
_SUM = torch.ops.aten.add.Tensor
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def module_path(path: str) -> str:
    """Return a module's path by Dynamo's: `L['self']._modules['layers'][3]` → `layers.3`."""
    path = _REGISTRY.sub("", path)
    path = _ROOT.sub("", path)
    path = _ITEM.sub(r".\1", path)
    return re.sub(r"\.{2,}", ".", path).strip(".")


def module_paths(module: GraphModule) -> dict[Node, str]:
    """Map nodes → dotted path of the user's module. A backward node takes the path of the forward
    node with its sequence number. Autograd's own sums of gradients have the number of the last
    forward node, and take the path of the gradient that completes them."""
    paths: dict[Node, str] = {}
    order = {node: position for position, node in enumerate(module.graph.nodes)}
    by_sequence: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack")
        sequence = node.meta.get("seq_nr")
        if stack:
            path = module_path(next(reversed(stack.values()))[0])
            if sequence is not None:
                by_sequence.setdefault(sequence, path)
        elif node.meta.get("partitioner_tag") == "is_backward" and node.target is _SUM:
            latest = max(node.all_input_nodes, key=order.__getitem__)
            path = paths.get(latest, "")
        elif node.meta.get("partitioner_tag") == "is_backward":
            path = by_sequence.get(sequence, "") if sequence is not None else ""
        else:
            path = ""
        paths[node] = path
    return paths


def only_replaces_statistics(node: Node) -> bool:
    """Return whether an operator that reads a value which the step overwrites may run again all the
    same: batch norm in training mode uses its running statistics only for their new values, and a
    compiled kernel contains no operator that must run once."""
    if isinstance(node.target, FusedKernel):
        return True
    name = str(node.target)
    if name not in _BATCH_NORM_TRAINING_ARGUMENT:
        return False
    position = _BATCH_NORM_TRAINING_ARGUMENT[name]
    return position is None or bool(node.args[position])


def all_nodes(traced: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs inside it."""
    for module in traced.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def has_checkpoints(traced: GraphModule) -> bool:
    """Return whether parts of a dynamo graph are checkpoints."""
    return any(map(is_checkpoint, all_nodes(traced)))


def is_reentrant_checkpoint(node: Node) -> bool:
    """Return whether a node of a dynamo graph is a reentrant checkpoint, or in one."""
    called = str(node.target) == CHECKPOINT and is_reentrant(node.kwargs)
    return called or node.meta.get(CHECKPOINTED) == REENTRANT


def is_checkpoint(node: Node) -> bool:
    """Return whether a node of a dynamo graph is a checkpoint."""
    return str(node.target) == CHECKPOINT or CHECKPOINTED in node.meta

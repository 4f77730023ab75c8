"""Traces a model's equal blocks once: Dynamo's trace of a block serves those like it.

Which blocks are alike is Dynamo's answer (`memopt.torch_private.regions`): the guards of the first
one's trace hold for the other, its arguments have the same layouts, and nothing that the trace read
was changed in between. It skips some guards, so `alike` compares the blocks, too. Where either
cannot tell, the block is traced. Afterwards the graph is written out, each operator with the module
stack of its own block, and what was relied on of the first block is relied on of each.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.capture.equal_blocks import LEAST
from memopt.torch_private.dynamo import export_root

_MODULES = 4
"""Blocks of fewer modules are no work to trace."""
_KINDS = 4
"""The most kinds of blocks of a class that are looked back for: stacks alternate between few."""


def forwards_of_blocks(model: nn.Module) -> frozenset[CodeType]:
    """Return the code of the forwards of a model's blocks. A class of blocks has many members in
    lists, none inside another class of blocks, and at least half of them equal an earlier one."""
    found, inner = defaultdict[type, list[nn.Module]](list), dict[type, set[type]]()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for block in module:
            kind = type(block)
            if not isinstance(vars(kind).get("forward"), FunctionType) or "forward" in vars(block):
                continue
            kinds = [type(one) for one in block.modules()]
            if len(kinds) >= _MODULES and not any(kind is one for one in kinds[1:]):
                found[kind].append(block)
                inner.setdefault(kind, set()).update(kinds[1:])
    chosen: list[type] = []
    for kind, blocks in sorted(found.items(), key=lambda one: -len(one[1])):
        apart = all(kind not in inner[one] and one not in inner[kind] for one in chosen)
        if len(blocks) >= LEAST and apart:
            chosen.append(kind)
    repeated = (kind for kind in chosen if 2 * _repeated(found[kind]) >= len(found[kind]))
    return frozenset(vars(kind)["forward"].__code__ for kind in repeated)


def _repeated(blocks: Sequence[nn.Module]) -> int:
    """Return how many blocks equal one of the last few distinct blocks before them."""
    kinds: list[nn.Module] = []
    for block in blocks:
        if not any(alike(one, block) for one in kinds[-_KINDS:]):
            kinds.append(block)
    return len(blocks) - len(kinds)


def alike(one: Any, other: Any) -> bool:
    """Whether two blocks differ in nothing but their number and what their tensors hold: in values,
    classes, layouts, hooks and objects neither they nor their modules do."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _layout(one) == _layout(other) and alike(vars(one), vars(other))
    if isinstance(one, nn.Module):
        return alike(vars(one), vars(other))
    if isinstance(one, dict):
        numbered = (str(key).endswith(_NUMBERS) for key in one)
        pairs = zip(numbered, one.values(), other.values(), strict=False)
        return list(one) == list(other) and all(
            alike(a, b) or (free and type(a) is type(b) is int) for free, a, b in pairs
        )
    if isinstance(one, partial):
        return alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return isinstance(one, _PLAIN) and one == other


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    known = tensor.device, tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_leaf
    return tensor.shape, tensor.stride(), *known


_PLAIN = (bool, int, float, complex, str, set, frozenset, torch.dtype, torch.device, torch.Size)
_NUMBERS = ("idx", "id", "index", "number")


def write_out(module: GraphModule) -> None:
    """Replace each region of a graph, in place, by its operators.

    Raises:
        ValueError: a region has graphs of its own.
    """
    graph, first = module.graph, dict[str, Node]()
    target = torch.ops.higher_order.invoke_subgraph
    regions = list(graph.find_nodes(op="call_function", target=target))
    for node in regions:
        held = str(node.args[0].target)
        body: GraphModule = getattr(module, held)
        if any(isinstance(one, GraphModule) for one in body.children()):
            raise ValueError("a region has graphs of its own")
        stacks = _Stacks(first.setdefault(held, node), node)
        inputs = [one for one in body.graph.nodes if one.op == "placeholder"]
        made: dict[Node, Any] = dict(zip(inputs, node.args[2:], strict=True))
        with graph.inserting_before(node):
            for one in body.graph.nodes:
                if one.op not in ("placeholder", "output"):
                    made[one] = graph.node_copy(one, made.__getitem__)
                    stacks.correct(made[one])
        outputs: Any = map_arg(body.graph.output_node().args[0], made.__getitem__)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    for held in first:
        for one in graph.find_nodes(op="get_attr", target=held):
            graph.erase_node(one)
        delattr(module, held)
    if regions:
        module.recompile()


class _Stacks:
    """The module stacks of a region's operators, which were traced in the first such region."""

    def __init__(self, first: Node, here: Node) -> None:
        self._here = here.meta.get(_STACK, {})
        self._old, self._new = (_block(one.meta.get(_STACK, {})) for one in (first, here))

    def correct(self, node: Node) -> None:
        """Give an operator, that was copied, the stack that it has here."""
        if _STACK not in node.meta:
            return
        own: dict[str, Any] = {}
        for key, (path, kind) in node.meta[_STACK].items():
            cleaned = path.replace(f".{export_root()}", "")
            if cleaned == self._old:
                own = {}  # the block: what comes after is inside it
            else:
                own[key] = cleaned.replace(self._old, self._new, 1), kind
        node.meta[_STACK] = {**self._here, **own}


def _block(stack: dict[str, Any]) -> str:
    """Return the path of the innermost module of a stack."""
    path, _ = list(stack.values())[-1]
    return str(path)


_STACK = "nn_module_stack"

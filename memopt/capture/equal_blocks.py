"""Traces the joint graph of a deep model with a few of its equal blocks, and writes out the others.

AOTAutograd's work grows with the number of operators. Where Dynamo's graph has a run of equal
blocks (the same operators in the same order, each reading its own parameters, what the block before
it made, and what all blocks share), autograd's backward of it has such a run, too, in the opposite
direction. So all but `KEPT` blocks are left out while the joint graph is traced; then the blocks
between are copies of their neighbours. That a joint graph is periodic is not assumed: each operator
of two kept blocks is compared, with its inputs and its results' layouts. Where anything differs,
the whole graph is traced.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.models.periods import Period, longest_period
from memopt.step.memory_layout import storage_of
from memopt.torch_private.aot import FakeTensor, called_alike

LEAST = 8
"""Fewer equal blocks are all traced."""
KEPT = 6
CUT = 2
"""The kept block after which others are left out, and which they are copied from."""


@dataclass(frozen=True)
class EqualBlocks:
    """A run of equal blocks in Dynamo's graph.

    Attributes:
        blocks: the run's place.
        targets: for each block, its parameters and buffers by name, in the same order.
        stacks: for each block, its operators' module stacks, in the same order.
    """

    blocks: Period
    targets: tuple[tuple[str, ...], ...]
    stacks: tuple[tuple[Any, ...], ...]

    @property
    def left_out(self) -> int:
        """The number of blocks that are not traced."""
        return self.blocks.count - KEPT

    def first_left_out(self) -> int:
        """Return the position in Dynamo's graph of the first operator that is left out."""
        return self.blocks.start + (CUT + 1) * self.blocks.length

    def place(self, kept: int) -> int:
        """Return which block of the whole model a kept block is."""
        return kept if kept <= CUT else kept + self.left_out


def equal_blocks(traced: GraphModule) -> EqualBlocks | None:
    """Return the longest run of equal blocks in Dynamo's graph that can be traced in part.

    None: there is none, or its blocks share or update tensors of their own, or other operators read
    what is made in a block that would be left out.
    """
    nodes = list(traced.graph.nodes)
    if len(nodes) < 2 * LEAST:
        return None
    position = {node: place for place, node in enumerate(nodes)}
    keys = [_key(traced, node) for node in nodes]
    read = [tuple(position[one] for one in read_by(node)) for node in nodes]

    def equal(first: int, second: int) -> bool:
        step = second - first
        return all(b in (a, a + step) for a, b in zip(read[first], read[second], strict=True))

    run = longest_period(keys, equal, LEAST)
    if run is None:
        return None
    offsets = [o for o in range(run.length) if nodes[run.start + o].op == "get_attr"]
    targets = tuple(
        tuple(str(nodes[run.at(block, o)].target) for o in offsets) for block in range(run.count)
    )
    stacks = tuple(
        tuple(nodes[run.at(b, o)].meta.get("nn_module_stack") for o in range(run.length))
        for b in range(run.count)
    )
    found = EqualBlocks(run, targets, stacks)
    alone = _of_one_block_each(traced, targets) and not _updated(nodes, run)
    return found if alone and _closed(found, read, len(nodes)) else None


def _closed(found: EqualBlocks, read: list[tuple[int, ...]], count: int) -> bool:
    """Whether shared values are made before the run, and blocks that are left out are read by the
    block after them alone."""
    run, first = found.blocks, found.first_left_out()
    after = first + found.left_out * run.length
    for position in range(count):
        in_run = run.start <= position < run.end
        for one in read[position]:
            if in_run and one >= run.start and position - one > 2 * run.length:
                return False
            if first <= one < after <= position and position >= after + run.length:
                return False
    return True


def _of_one_block_each(traced: GraphModule, targets: tuple[tuple[str, ...], ...]) -> bool:
    """Whether each parameter and buffer of the blocks belongs to one block alone, and so does its
    memory."""
    used = Counter(str(node.target) for node in traced.graph.find_nodes(op="get_attr"))
    tensors = {name: attrgetter(name)(traced) for name in used}
    storages = {name: storage_of(one) for name, one in tensors.items() if is_plain(one)}
    sharing = Counter(storages.values())
    return all(
        used[name] == 1 and sharing[storages[name]] == 1 for block in targets for name in block
    )


def _updated(nodes: list[Node], run: Period) -> bool:
    """Whether an operator of the first block seems to update a parameter or buffer. One that is
    missed here is found in the joint graph, at the cost of a trace."""
    for node in nodes[run.start : run.start + run.length]:
        name = getattr(node.target, "__name__", str(node.target))
        in_place = name.endswith("_") and not name.endswith("__")
        held = [one for one in node.all_input_nodes if one.op == "get_attr"]
        if held and (in_place or ("norm" in name and len(held) > 2)):
            return True
    return False


@contextlib.contextmanager
def without_most(traced: GraphModule, found: EqualBlocks) -> Iterator[None]:
    """Leave most blocks out of Dynamo's graph inside; restore it afterwards."""
    whole, run = traced.graph, found.blocks
    nodes, first = list(whole.nodes), found.first_left_out()
    skipped = found.left_out * run.length
    part = called_alike(whole)
    copies: dict[Node, Node] = {}
    position = {node: place for place, node in enumerate(nodes)}

    def copied(node: Node) -> Node:
        place = position[node]
        return copies[nodes[place - skipped] if first <= place < first + skipped else node]

    for place, node in enumerate(nodes):
        if not first <= place < first + skipped:
            copies[node] = part.node_copy(node, copied)
    traced.graph = part
    try:
        yield
    finally:
        traced.graph = whole


def _key(traced: GraphModule, node: Node) -> Any:
    """Return the key by which two operators are equal, apart from the values that they read."""
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(traced)
        if not is_plain(value):
            return id(node)
        return "get_attr", type(value), plain(value)
    if node.op not in ("call_function", "call_method"):
        return id(node)
    given = plain((node.args, node.kwargs))
    return node.op, node.target, given, plain(node.meta.get("example_value"))


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
)


def read_by(node: Node) -> list[Node]:
    """Return the nodes that an operator reads, each as often as it is an argument."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose metadata says all that matters of it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return False
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):  # inside functorch's transforms
        return False
    return value.layout is torch.strided and not value.is_quantized


def plain(value: Any) -> Hashable:
    """Return a comparable form of an operator's argument or result: all metadata of a tensor, and
    only the fact that it is one for a node. An unknown object equals nothing else."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Node):
        return Node
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            return id(value)
        whole_bytes = value.untyped_storage().nbytes()
        sizes = (*value.shape, *value.stride(), value.storage_offset(), whole_bytes)
        if any(type(size) is not int for size in sizes):
            return id(value)
        about = (value.dtype, value.device, value.requires_grad, value.dim())
        return (torch.Tensor, *sizes, *about)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(plain, value))
    if isinstance(value, dict):
        return (dict, *((key, plain(one)) for key, one in value.items()))
    if isinstance(value, slice):
        return slice, plain(value.start), plain(value.stop), plain(value.step)
    return id(value)

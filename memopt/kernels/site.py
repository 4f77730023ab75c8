"""Finds operators of a captured step and attaches implementations to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.kernels.bits import packed_bytes
from memopt.kernels.kernel import PARTS, Kernel
from memopt.models.device import in_blocks
from memopt.models.graph import Implementation, Tensor
from memopt.step.build import Lowering
from memopt.step.in_place import overwritable

Attach = Callable[["Sites"], None]
"""Adds one family's alternatives wherever they fit."""


def value_of(node: Any) -> Any:
    """Return the fake value of an FX node, or of an argument that is one."""
    return node.meta["val"]


def storage_bytes(node: Any) -> int:
    """Return the bytes of the storage behind a node's tensor."""
    return int(value_of(node).untyped_storage().nbytes())


def part_bytes(node: Any, parts: int = PARTS) -> int:
    """Return the bytes of the largest of so many parts of a node's tensor."""
    return -(-storage_bytes(node) // parts)


def contiguous(*nodes: Any) -> bool:
    """Return whether the tensors of all nodes are contiguous."""
    return all(value_of(node).is_contiguous() for node in nodes)


class Sites:
    """A Lowering under extension: operators are found by target, alternatives added by name.

    Every alternative is an FX node of its own (outside the joint graph) whose arguments are nodes
    of the joint graph, so the profiler and the executor treat it as they treat the operator's.
    """

    def __init__(self, lowering: Lowering, *, exact_only: bool, block_bytes: int) -> None:
        self._lowering = lowering
        self._exact_only = exact_only
        self._block_bytes = block_bytes
        self._fx = FxGraph()
        self._tensors = list(lowering.graph.tensors)
        self._choices: dict[int, list[Implementation]] = {}
        self._nodes = dict(lowering.alternatives)
        self._storages = dict(lowering.storages)
        self._bases = dict(lowering.bases)
        self._operator = {node: i for i, node in enumerate(lowering.nodes)}

    @property
    def cuda_blocks(self) -> bool:
        """Whether sizes are those of CUDA's allocator; estimates for it trace on the CPU."""
        return self._block_bytes > 1

    def calls(self, *targets: str) -> Iterator[Node]:
        """Yield kernel calls of the given targets, "aten.relu.default", in the graph's order."""
        for node in self._lowering.nodes:
            if str(node.target) in targets:
                yield node

    def pairs(self, backward: str, position: int, *forwards: str) -> Iterator[tuple[Node, Node]]:
        """Yield (forward, backward) calls, in the graph's order of the backwards. The argument at a
        position of the backward is a result of the forward; `forwards` restricts its target."""
        for call in self.calls(backward):
            forward = self.producer(call.args[position], *forwards)
            if forward is not None:
                yield forward, call

    def producer(self, node: Any, *targets: str) -> Node | None:
        """Return the kernel call whose result, or a view of it with the same shape and strides,
        `node` is. None for resident tensors, other views and other targets than the given ones."""
        if not isinstance(node, Node):
            return None
        tensor = self._storages[node][0]
        operator = self._lowering.graph.producer.get(tensor) if tensor is not None else None
        if tensor is None or operator is None:
            return None
        base, here = self._bases[tensor].meta["val"], node.meta["val"]
        call = self._lowering.nodes[operator]
        same = base.shape == here.shape and base.stride() == here.stride()
        return call if same and (not targets or str(call.target) in targets) else None

    def result(self, node: Node, position: int = 0) -> Node | None:
        """Return the node that names one result of a kernel call; None if nothing does."""
        tensor = self._storages[node][position]
        return None if tensor is None else self._bases.get(tensor)

    def looks_into(self, view: Node, node: Node) -> bool:
        """Return whether two nodes share a storage."""
        return self._storages.get(view, (None,))[0] == self._storages[node][0]

    def extra(self, name: str, value: torch.Tensor) -> Node:
        """Add a tensor that only alternatives write and read, like `value` (a fake tensor)."""
        node = self._fx.placeholder(name)
        node.meta["val"] = value
        size = value.untyped_storage().nbytes()
        self._storages[node] = (len(self._tensors),)
        self._bases[len(self._tensors)] = node
        self._tensors.append(Tensor(name, in_blocks(size, self._block_bytes)))
        return node

    def bits(self, forward: Node, value: torch.Tensor) -> Node:
        """Add an extra tensor with a bit for each element of `value`, made by `forward`."""
        packed = value.new_empty((packed_bytes(value.numel()),), dtype=torch.uint8)
        return self.extra(f"{forward.name}__bits", packed)

    def add(
        self,
        operator: Node,
        name: str,
        kernel: Kernel,
        args: tuple[Any, ...],
        results: tuple[Node | None, ...] | None = None,
        *,
        workspace_bytes: int = 0,
        exact: bool = True,
        like: float | tuple[tuple[Node, float], ...] = (),
        moved_bytes: int = 0,
        parts: int = 0,
        requires: tuple[Callable[..., bool], tuple[Any, ...]] | None = None,
        draws: bool = False,
    ) -> None:
        """Add an alternative of a kernel call.

        Args:
            operator: the call that it replaces.
            name: unique within the operator.
            kernel: the kernel that runs.
            args: its arguments; nodes are tensors it reads.
            results: for each element of its tuple of results the node that names the tensor
                (None: dropped); None: it returns exactly what the operator does.
            workspace_bytes: for estimates: scratch memory beside the results; measured otherwise.
            exact: whether results are the operator's bit for bit.
            like: for estimates: the share of the operator's work that it does, or the calls whose
                work it does, and the share of each; (): its time is that of moving its arguments
                and results.
            moved_bytes: for estimates: scratch memory read and written beside what `like` moves.
            parts: for estimates: into how many parts of the batch it divides the calls of `like`,
                whose workspace it takes; 0: it runs other kernels.
            requires: (a test, its arguments): the values of parameters must pass it for the
                alternative to be chosen; the kernel itself must check them again when it runs.
            draws: for a random operator, whether it draws the operator's own numbers and leaves
                the generator where the operator does.

        Raises:
            ValueError: it replaces a random operator and does not draw as that does: all later
                draws would give other numbers.
        """
        if self._exact_only and not exact:
            return
        index = self._operator[operator]
        if self._lowering.graph.operators[index].random and not draws:
            raise ValueError(
                f"the implementation {name!r} stands in for {operator.name!r}, which draws random "
                "numbers: it must draw the same ones from the same generator; if it does, say so: "
                "Sites.add(..., draws=True)"
            )
        call = self._fx.call_function(kernel, args, name=f"{operator.name}__{name}")
        if results is None:
            call.meta["val"] = operator.meta["val"]
            self._storages[call] = self._storages[operator]
        else:
            call.meta["val"] = tuple(None if r is None else r.meta["val"] for r in results)
            self._storages[call] = tuple(
                None if r is None else self._storages[r][0] for r in results
            )
        call.meta["memopt_like"] = like if isinstance(like, tuple) else ((operator, like),)
        call.meta["memopt_moved_bytes"], call.meta["memopt_parts"] = moved_bytes, parts
        call.meta["memopt_requires"] = requires
        resident = self._lowering.graph.resident
        reads = dict.fromkeys(
            t for node in call.all_input_nodes for t in self._storages[node] if t is not None
        )
        writes = dict.fromkeys(
            t for t in self._storages[call] if t is not None and t not in resident
        )
        own = len(self._lowering.graph.tensors)
        self._nodes[index, name] = call
        self._choices.setdefault(index, []).append(
            Implementation(
                name,
                0.0,
                workspace_bytes,
                tuple(reads),
                tuple(writes),
                exact,
                self._in_place(call),
                packed=any(t >= own for t in (*reads, *writes)),
            )
        )

    def _read_and_written(self, choice: Implementation) -> tuple[int, int]:
        """Return the key by which alternatives are sorted: those that read most bytes first, of
        these those that write least."""
        reads = (self._tensors[t] for t in choice.reads or ())
        read_bytes = sum(tensor.size_bytes for tensor in reads if not tensor.resident)
        return -read_bytes, sum(self._tensors[t].size_bytes for t in choice.writes or ())

    def _in_place(self, call: Node) -> tuple[int, ...]:
        """Return the tensors over which a call may write its first result: computed ones that the
        step does not return. One that the call reads through a view is among them only if the step
        does not return the result either."""
        graph, made = self._lowering.graph, self._storages[call][0]
        found = []
        for argument in overwritable(call):
            (tensor,) = self._storages[argument]
            if tensor is None or made is None:
                continue
            if tensor not in graph.producer and tensor < len(graph.tensors):
                continue
            plain = self._bases.get(tensor) is argument
            if tensor not in graph.kept and (plain or made not in graph.kept):
                found.append(tensor)
        return tuple(found)

    def lowering(self) -> Lowering:
        """Return the extended lowering; its Graph has the alternatives, unpriced.

        An operator's alternatives are in the order in which two should run: first those that read
        much and write little, so that an operand can be freed, or overwritten by the second.
        """
        graph = self._lowering.graph
        operators = list(graph.operators)
        for i, choices in self._choices.items():
            added = sorted(choices, key=self._read_and_written)
            known = operators[i].implementations
            operators[i] = replace(operators[i], implementations=(*known, *added))
        return replace(
            self._lowering,
            graph=replace(graph, tensors=tuple(self._tensors), operators=tuple(operators)),
            storages=self._storages,
            bases=self._bases,
            alternatives=self._nodes,
        )

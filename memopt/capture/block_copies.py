"""Writes out the equal blocks that were left out of a joint graph (`equal_blocks`).

A kept block is numbered as in Dynamo's part graph. In the joint graph the forward is a run whose
parts go up through the blocks, the backward one whose parts go down. Where a part begins does not
matter: its number is that of the first parameter or forward part that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memopt.capture.block_runs import CopiedNames
from memopt.capture.equal_blocks import CUT, KEPT, EqualBlocks, plain, read_by
from memopt.models.periods import BlockRun, longest_period, run_of
from memopt.step.memory_layout import storage_of
from memopt.step.nodes import tensors_of
from memopt.torch_private import pytree
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.modes import dispatch_modes_off


class _NotPeriodicError(Exception):
    """The joint graph is not as periodic as Dynamo's; the message says where."""


def with_all_blocks(module: GraphModule, found: EqualBlocks) -> bool:
    """Insert, in place, the blocks that are missing in a joint graph.

    Returns:
        Whether that was possible; if not, the graph is as it was.
    """
    try:
        with dispatch_modes_off():
            module.graph = _WholeJoint(module.graph, found).written()
    except _NotPeriodicError:
        return False
    return True


class _WholeJoint:
    """The joint graph with all blocks, made from one with a few."""

    def __init__(self, graph: FxGraph, found: EqualBlocks) -> None:
        self._found = found
        self._nodes = list(graph.nodes)
        self._position = {node: place for place, node in enumerate(self._nodes)}
        self._graph = graph
        self._inputs = self._inputs_by_block()
        kept = {found.place(block): block for block in range(KEPT)}
        self._slot = {
            self._inputs[block][slot]: (kept[block], slot)
            for block in kept
            for slot in range(len(self._inputs[block]))
        }
        self._check_not_updated()
        self._read = [tuple(self._position[one] for one in read_by(n)) for n in self._nodes]
        self._runs = self._both_runs()
        self._made: dict[tuple[int, int, int], Node] = {}
        self._new: dict[Node, Node] = {}
        self._homes = self._homes_of_storages()
        self._stacks = {
            _of_stack(stack): (kept, offset)
            for kept in reversed(range(KEPT))
            for offset, stack in enumerate(found.stacks[found.place(kept)])
            if stack
        }

    def _inputs_by_block(self) -> list[list[Node]]:
        by_name = {
            node.meta["desc"].target: node
            for node in self._graph.find_nodes(op="placeholder")
            if hasattr(node.meta.get("desc"), "target")
        }
        try:
            return [[by_name[name] for name in block] for block in self._found.targets]
        except KeyError as error:
            raise _NotPeriodicError(f"{error} is no input") from error

    def _check_not_updated(self) -> None:
        mine = {node.meta["desc"] for block in self._inputs for node in block}
        for descriptor in self._output.meta["desc"]:
            if getattr(descriptor, "mutated_input", None) in mine:
                raise _NotPeriodicError(f"{descriptor} is updated")

    @property
    def _output(self) -> Node:
        output: Node = self._nodes[-1]
        return output

    def _both_runs(self) -> tuple[BlockRun, BlockRun]:
        """Return the run of the forward and that of the backward."""
        end = len(self._nodes) - 1
        called = [i for i, node in enumerate(self._nodes) if node.op == "call_function"]
        tags = {i: self._nodes[i].meta.get("partitioner_tag") for i in called}
        turn = next((i for i in called if tags[i] == "is_backward"), end)
        forward = self._run(called[0], turn, 1, None)
        return forward, self._run(turn, end, -1, forward)

    def _run(self, begin: int, end: int, way: int, forward: BlockRun | None) -> BlockRun:
        back = 0 if forward is None else -forward.parts.length
        keys = [_key(node) for node in self._nodes[begin:end]]

        def equal(first: int, second: int) -> bool:
            step = second - first
            pairs = zip(self._read[begin + first], self._read[begin + second], strict=True)
            return all(self._follows(a, b, way, step, back) for a, b in pairs)

        parts = longest_period(keys, equal, 3)
        if parts is None:
            raise _NotPeriodicError("no run of equal parts")
        parts = replace(parts, start=begin + parts.start)
        of_parts = () if forward is None else (forward,)
        numbers = (
            self._number(one, of_parts) for place in parts.positions(0) for one in self._read[place]
        )
        first = next((number for number in numbers if number is not None), None)
        if first is None and forward is None:
            first = 1  # all parameters are shared: any number will do
        if first is None:
            raise _NotPeriodicError("no part reads of a block")
        run = BlockRun(parts, way, first)
        if not (run.has(CUT) and run.has(CUT + 1)):
            raise _NotPeriodicError("a run is too short")
        return run

    def _follows(self, one: int, other: int, way: int, step: int, back: int) -> bool:
        """Whether two values (positions) that operators a part apart read correspond."""
        slot, after = self._slot.get(self._nodes[one]), self._slot.get(self._nodes[other])
        if slot is not None or after is not None:
            if slot is None or after is None:
                return False
            return slot[1] == after[1] and after[0] == slot[0] + way
        return other in (one, one + step) or (way < 0 and other == one + back)

    def written(self) -> FxGraph:
        """Return the graph with all blocks."""
        self._check_ends()
        left_out, graph = self._found.left_out, FxGraph()
        names = CopiedNames(self._nodes, self._runs, left_out)
        forward, backward = self._runs
        up = range(CUT + 1, CUT + 1 + left_out)
        for place, node in enumerate(self._nodes):
            if place == backward.at(CUT, 0):
                self._copy(graph, backward, reversed(up), names)
            if node is self._output:
                break
            self._write(graph, place, names)
            if place == forward.at(CUT, forward.parts.length - 1):
                self._copy(graph, forward, iter(up), names)
        (results,) = self._output.args
        made = graph.output(self._results(results))
        made.meta = self._output.meta
        if not names.unique():
            raise _NotPeriodicError("names")
        return graph

    def _write(self, graph: FxGraph, place: int, names: CopiedNames) -> None:
        node = self._nodes[place]
        run = run_of(self._runs, place)
        shift = self._found.left_out if run is not None and run.number(place) > CUT else 0
        if run is None:
            args, kwargs = map_arg((node.args, node.kwargs), self._written)
        else:
            args, kwargs = self._arguments(node, shift)
        made = graph.create_node(node.op, node.target, args, kwargs, names.of(place), node.type)
        made.meta = dict(node.meta)
        if run is not None:
            moves = any(self._moves(value, node, shift) for value in tensors_of(node))
            made.meta = (self._with_values if moves else self._with_stacks)(node, shift)
        if "seq_nr" in made.meta:
            made.meta["seq_nr"] = names.sequence(place)
        self._new[node] = made

    def _copy(
        self, graph: FxGraph, run: BlockRun, numbers: Iterator[int], names: CopiedNames
    ) -> None:
        which = self._runs.index(run)
        for number in numbers:
            for offset in range(run.parts.length):
                place = run.at(CUT, offset)
                node = self._nodes[place]
                args, kwargs = self._arguments(node, number - CUT)
                name = names.of(place, number)
                made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
                self._made[which, offset, number] = made
                made.meta = self._with_values(node, number - CUT)
                if "seq_nr" in made.meta:
                    made.meta["seq_nr"] = names.sequence(place, number)

    def _arguments(self, node: Node, shift: int) -> Any:
        return map_arg((node.args, node.kwargs), lambda one: self._corresponding(one, shift))

    def _corresponding(self, one: Node, shift: int) -> Node:
        """Return what an operator reads for `one` if its own number is higher by `shift`."""
        if one in self._slot:
            block, slot = self._slot[one]
            return self._written(self._inputs[block + shift][slot])
        place = self._position[one]
        for which, run in enumerate(self._runs):
            if run.holds(place):
                return self._part(which, run.offset(place), run.number(place) + shift)
        return self._written(one)

    def _written(self, node: Node) -> Node:
        if node not in self._new:
            raise _NotPeriodicError(f"{node} is read before it is made")
        return self._new[node]

    def _part(self, which: int, offset: int, number: int) -> Node:
        run, left_out = self._runs[which], self._found.left_out
        if CUT < number <= CUT + left_out:
            if (which, offset, number) not in self._made:
                raise _NotPeriodicError("a part is read before it is made")
            return self._made[which, offset, number]
        kept = number if number <= CUT else number - left_out
        if not run.has(kept):
            raise _NotPeriodicError("beyond a run's end")
        return self._written(self._nodes[run.at(kept, offset)])

    def _check_ends(self) -> None:
        """Check that operators before and after the runs read only from their ends, and that the
        copied parts and their neighbours read the same values from outside."""
        forward, backward = self._runs
        for place in range(len(self._nodes) - 1):
            run = run_of(self._runs, place)
            if run is None:
                top = forward.parts.end <= place < backward.parts.start
                for one in self._read[place]:
                    number = self._number(one, self._runs)
                    if number is not None and (number > CUT) != top:
                        raise _NotPeriodicError(f"{self._nodes[place]} reads across")
            elif run.number(place) in (CUT, CUT + 1):
                kept, offset = run.number(place), run.offset(place)
                other = run.at(2 * CUT + 1 - kept, offset)
                pairs = zip(self._read[place], self._read[other], strict=True)
                if any((self._number(a, self._runs) is None) != (a == b) for a, b in pairs):
                    raise _NotPeriodicError(f"{self._nodes[place]} reads from an end")

    def _number(self, place: int, runs: tuple[BlockRun, ...]) -> int | None:
        """Return a value's number, by its block or part; None: it belongs to none."""
        slot = self._slot.get(self._nodes[place])
        if slot is not None:
            return slot[0]
        run = run_of(runs, place)
        return None if run is None else run.number(place)

    def _results(self, results: Any) -> list[Any]:
        """Return the outputs, with the gradients of all blocks' parameters."""
        descriptors = self._output.meta["desc"]
        places = {
            getattr(descriptor, "grad_of", None): place
            for place, descriptor in enumerate(descriptors)
            if hasattr(descriptor, "grad_of")
        }
        found = [self._written(one) if isinstance(one, Node) else one for one in results]
        backward = self._runs[1]
        for slot, given in enumerate(self._inputs[CUT]):
            if given.meta["desc"] not in places:
                continue
            beside = (CUT, CUT + 1 + self._found.left_out)
            gradients = [
                results[places[self._inputs[block][slot].meta["desc"]]] for block in beside
            ]
            if all(one is None for one in gradients):
                continue
            if not all(isinstance(one, Node) for one in gradients):
                raise _NotPeriodicError("gradients")
            spots = [self._position[one] for one in gradients]
            if not all(backward.holds(spot) for spot in spots):
                raise _NotPeriodicError("a gradient is from an end")
            numbers = [backward.number(spot) for spot in spots]
            offset = backward.offset(spots[0])
            if numbers[1] != numbers[0] + 1 or backward.offset(spots[1]) != offset:
                raise _NotPeriodicError("gradients")
            # Also of the blocks beside: a gradient may be of a part with another number.
            for block in range(CUT, CUT + 2 + self._found.left_out):
                place = places[self._inputs[block][slot].meta["desc"]]
                found[place] = self._part(1, offset, numbers[0] + block - CUT)
        return found

    # What is known of values

    def _homes_of_storages(self) -> dict[int, Node]:
        homes: dict[int, Node] = {}
        for node in self._nodes:
            for value in tensors_of(node):
                homes.setdefault(storage_of(value), node)
        return homes

    def _with_values(self, node: Node, shift: int) -> dict[str, Any]:
        """Return the metadata of an operator in another block, its results in memory of their
        own."""
        meta, own = self._with_stacks(node, shift), dict[int, Any]()
        known = meta.get("val")
        if isinstance(known, torch.Tensor):  # of nearly all; a pytree takes as long as the rest
            meta["val"] = self._value(known, node, shift, own)
        else:
            meta["val"] = pytree.tree_map_only(
                torch.Tensor, lambda value: self._value(value, node, shift, own), known
            )
        return meta

    def _with_stacks(self, node: Node, shift: int) -> dict[str, Any]:
        """Return the metadata of an operator, with the module stacks of another block."""
        meta = dict(node.meta)
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            place = self._stacks.get(_of_stack(meta[key])) if key in meta else None
            if place is not None:
                meta[key] = self._found.stacks[place[0] + shift][place[1]]
        return meta

    def _value(self, value: Any, node: Node, shift: int, own: dict[int, Any]) -> Any:
        name = storage_of(value)
        home = self._homes[name]
        if home is node:
            if name not in own:
                size_bytes = value.untyped_storage().nbytes()
                own[name] = torch.UntypedStorage(size_bytes, device="meta")  # type: ignore[no-untyped-call]
            storage = own[name]
        else:
            there = self._corresponding(home, shift)
            values = zip(tensors_of(home), tensors_of(there), strict=True)
            storage = next(b.untyped_storage() for a, b in values if storage_of(a) == name)
        place = value.storage_offset(), value.shape, value.stride()
        bare = torch.empty(0, dtype=value.dtype, device="meta").set_(storage, *place)
        return FakeTensor(value.fake_mode, bare, value.device)

    def _moves(self, value: torch.Tensor, node: Node, shift: int) -> bool:
        """Whether a kept operator's result is a view of a value that the deeper model replaces."""
        home = self._homes[storage_of(value)]
        return home is not node and self._corresponding(home, shift) is not self._new[home]


def _of_stack(stack: Any) -> Any:
    return tuple(str(path) for path, _ in stack.values())


def _key(node: Node) -> Any:
    if node.op != "call_function":
        return id(node)
    return node.target, plain((node.args, node.kwargs)), plain(node.meta.get("val"))

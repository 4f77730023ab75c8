"""A plain interpreter of programs: the oracle that generated code is tested against."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from memopt.errors import InvalidProgramError
from memopt.executor.host_updates import gradient_of
from memopt.executor.values import Halves, argument_in, attribute_of, base_of, kernel_of, unpacked
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, DropHost, Free, Instruction, SwapIn, SwapOut
from memopt.step.collectives import waited
from memopt.step.in_place import in_place_call


class _Machine:
    """The state of a step: device values by node, host copies by tensor, generator states."""

    def __init__(self, halves: Halves, swap: Any, random: Any, homes: Any) -> None:
        self.halves = halves
        self.lowering = halves.lowering
        self.swap = swap
        self.random = random
        self.homes = homes
        self.values: dict[Node, Any] = {}
        self.host: dict[int, Any] = {}
        self.lease: Any = None
        self.states: dict[int, bytearray] = {}
        pairs = zip(halves.lowering.nodes, halves.lowering.graph.operators, strict=True)
        self.collectives = {node for node, operator in pairs if operator.collective is not None}

    def read(self, node: Node) -> Any:
        if node in self.values:
            return self.values[node]
        if node.op == "get_attr":
            return attribute_of(self.halves, node)
        if kernel_of(self.lowering, node) is not None:
            base = base_of(self.lowering, node)
            if base is not node:
                return self.read(base)
        if node not in self.lowering.views or kernel_of(self.lowering, node) is not None:
            raise InvalidProgramError(f"{node.name} is read while it is not on the device")
        return self.call(node)

    def call(self, node: Node) -> Any:
        if node.target is operator.getitem:
            return self.read(node.args[0])[node.args[1]]  # type: ignore[arg-type]
        args = map_arg(node.args, self.read)
        kwargs = map_arg(node.kwargs, self.read)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def given(self, primals: list[Any]) -> None:
        """Take the step's arguments, but for parameters and state that are swapped in."""
        homes = {self.lowering.bases.get(tensor) for tensor in self.halves.moved}
        for primal, value in zip(self.halves.captured.primals, primals, strict=True):
            if primal.node not in homes:
                self.values[primal.node] = value

    def resume(self) -> None:
        """Take parameters and state that the step before has left on the device."""
        for tensor in self.halves.from_before:
            there = self.homes.resume(tensor)
            if there is not None:
                self.values[self.lowering.bases[tensor]] = there

    def step(self, instruction: Instruction) -> None:
        bases = self.lowering.bases
        match instruction:
            case Compute(op, outputs, implementation, in_place):
                if variant(self.lowering.graph.operators[op], implementation).on_host:
                    self.homes.update(op, self.host[gradient_of(self.lowering, op)[2]])
                    return
                node = self.lowering.node_of(op, implementation)
                self.compute(op, outputs, node, in_place)
            case Free(tensor) if tensor in self.halves.moved:
                self.values.pop(bases.get(tensor), None)  # type: ignore[arg-type]
                self.homes.drop(tensor)
            case Free(tensor):
                if tensor in self.host:
                    self.swap.wait(self.host[tensor])
                self.values.pop(bases.get(tensor), None)  # type: ignore[arg-type]
            case SwapOut(tensor) if tensor in self.halves.moved:
                self.homes.back(tensor)
            case SwapIn(tensor) if tensor in self.halves.moved:
                brought = self.homes.bring(tensor)
                self.homes.wait(tensor)
                if brought is not None:
                    self.values[bases[tensor]] = brought
            case SwapOut(tensor):
                address = self.halves.host_placement.offsets[tensor]
                self.host[tensor] = self.swap.out(self.values[bases[tensor]], address, self.lease)
            case SwapIn(tensor):
                self.values[bases[tensor]] = self.swap.bring(self.host[tensor])
                self.swap.wait(self.host[tensor])
            case DropHost(tensor):
                if self.homes is not None:
                    self.homes.updated(tensor)
                self.swap.wait(self.host[tensor])
                del self.host[tensor]
            case _:
                raise InvalidProgramError("a second loss boundary")

    def compute(self, op: int, outputs: tuple[int, ...], node: Node, in_place: int | None) -> None:
        if self.lowering.nodes[op] in self.halves.absence.nodes:
            result = self.halves.absence.result(node, self.lowering.storages[node])()
            if in_place is not None:
                self.values.pop(self.lowering.bases[in_place])
        elif in_place is not None:
            target, args, kwargs = in_place_call(node, argument_in(self.lowering, node, in_place))
            result = target(*map_arg(args, self.read), **map_arg(kwargs, self.read))
            self.values.pop(self.lowering.bases[in_place])
        elif op in self.states:
            with self.random.lock, self.random.replay(self.states[op]):
                result = self.call(node)
        else:
            with self.random.lock:
                if op in self.halves.repeated_random:
                    self.states[op] = self.random.save()
                result = self.call(node)
        if node in self.collectives:
            waited(result)
        for position, base, _ in unpacked(self.lowering, node, outputs):
            self.values[base] = result if position is None else result[position]


def interpret(halves: Halves, swap: Any, random: Any, homes: Any = None) -> tuple[Any, Any]:
    """Return (forward, backward) callables with the signatures of `codegen.generate`'s."""
    captured = halves.captured
    bases = [halves.lowering.bases[t] for t in halves.saved]

    def forward(primals: list[Any]) -> tuple[list[Any], list[Any]]:
        machine = _Machine(halves, swap, random, homes)
        machine.given(primals)
        machine.resume()
        if halves.host_placement.offsets:
            machine.lease = swap.lease()
        for instruction in halves.forward:
            machine.step(instruction)
        outputs = [map_arg(o, machine.read) for o in captured.forward_outputs]
        values = [machine.values[base] for base in bases]
        machine.values.clear()
        return outputs, [*values, *machine.host.values(), machine.lease, machine]

    def backward(primals: list[Any], arguments: list[Any], saved: list[Any]) -> tuple[Any, ...]:
        machine = _Machine(halves, swap, random, homes)
        *values, machine.lease, before = saved
        saved.clear()
        machine.values = dict(zip(bases, values, strict=False))
        machine.host = dict(zip(before.host, values[len(bases) :], strict=True))
        machine.states = dict(before.states)
        del before, values
        machine.given(primals)
        machine.values.update(zip(captured.tangents, arguments[1:], strict=True))
        arguments.clear()
        for instruction in halves.backward:
            machine.step(instruction)
        results = (*halves.gradients, *captured.other_results)
        return tuple(map_arg(g, machine.read) for g in results)

    return forward, backward

"""Writes one half of a step as Python: a line per kernel or view, `del` where the plan frees."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from memopt.errors import InvalidProgramError
from memopt.executor.arena_code import ArenaWriter
from memopt.executor.collectives import UnderWay
from memopt.executor.host_updates import gradient_of
from memopt.executor.released import released
from memopt.executor.values import (
    Halves,
    argument_in,
    attribute_of,
    base_of,
    kernel_of,
    unpacked,
)
from memopt.executor.views import Look, is_laid_out_one_way, look_of, looked
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, DropHost, Free, Instruction, SwapIn, SwapOut
from memopt.step.backend import is_on_host
from memopt.step.collectives import WAIT, is_wait, waited
from memopt.step.in_place import in_place_call


class Writer:
    """Emits one half of a step and tracks which nodes have a variable."""

    def __init__(self, halves: Halves, names: dict[Any, str], globals_: dict[str, Any]) -> None:
        self.halves = halves
        self.lowering = halves.lowering
        self.names = names
        self.globals = globals_
        self.lines: list[str] = []
        self.bound: set[Node] = set()
        self.variables: dict[int, list[Node]] = {}
        self.swapping_out: set[int] = set()
        self.swapping_in: set[int] = set()
        self.updating: set[int] = set()
        self.sending = UnderWay(halves.lowering)
        # Tensors of CPU collectives that a thread of the process group may still hold.
        self.held: set[int] = set()
        self.ran: set[int] = set()
        # Results whose layout is certain, and the views that were made of them.
        self.laid_out: set[Node] = set()
        self.looks: dict[Look, Node] = {}
        captured = halves.captured
        self.outputs = {one for one in captured.forward_outputs if isinstance(one, Node)}
        self.results = {*self.outputs, *captured.gradients, *captured.other_results}
        self.arena: ArenaWriter | None = None
        self.position = 0

    def emit(self, line: str) -> None:
        self.lines.append(f"    {line}")

    def bind(self, node: Node) -> str:
        self.bound.add(node)
        for tensor in self.lowering.storages.get(node, ()):
            if tensor is not None:
                self.variables.setdefault(tensor, []).append(node)
        return node.name

    def constant(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        key = ("constant", repr(value))
        if key not in self.names:
            self.names[key] = f"k{len(self.names)}"
            self.globals[self.names[key]] = value
        return self.names[key]

    def argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.value(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.argument(v) for v in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if value else "()"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in value.items()) + "}"
        return self.constant(value)

    def call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self.argument(node.args[0])}[{node.args[1]!r}]"
        return self.call_of(node.target, node.args, node.kwargs)

    def call_over(self, node: Node, tensor: int) -> str:
        """Return the call that writes a node's result over its argument in storage `tensor`."""
        return self.call_of(*in_place_call(node, argument_in(self.lowering, node, tensor)))

    def call_of(self, target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        arguments = [self.argument(a) for a in args]
        arguments += [f"{k}={self.argument(v)}" for k, v in kwargs.items()]
        return f"{self.kernel(target)}({', '.join(arguments)})"

    def kernel(self, target: Any) -> str:
        """Return the name of a callee. Two kernels of one operator (memopt's form of it and
        torch's) have two names."""
        plain = "".join(c if c.isalnum() else "_" for c in str(target))
        names = itertools.chain([plain], (f"{plain}_{i}" for i in itertools.count(2)))
        return next(n for n in names if self.globals.setdefault(n, target) == target)

    def value(self, node: Node) -> str:
        """Return the variable of a node's value; a view without one is made first."""
        if node in self.bound:
            return node.name
        if node.op == "get_attr":
            self.globals[node.name] = attribute_of(self.halves, node)
            return node.name
        kernel = kernel_of(self.lowering, node)
        if kernel is not None:
            base = base_of(self.lowering, node)
            if base in self.bound and base is not node:
                return base.name
            raise InvalidProgramError(f"{node.name} is read before {kernel.name} has run")
        if node not in self.lowering.views:
            raise InvalidProgramError(f"{node.name} is read while it is not on the device")
        text = self.look(node) or self.call(node)
        if is_wait(node.target):
            for other in self.sending.beside(node):
                self.settle(other)
            self.landed(self.sending.waited(node))
            text = self.waiting(text)
        self.emit(f"{self.bind(node)} = {text}")
        return node.name

    def look(self, node: Node) -> str | None:
        """Return a view as one strided view of a result whose layout is certain, or as a name that
        it already has; None: it must be made by the captured view calls."""
        found = None if node in self.outputs else look_of(node, self.lowering.views)
        if found is None:
            return None
        if kernel_of(self.lowering, found.root) is not None:
            found = replace(found, root=base_of(self.lowering, found.root))
        if found.root not in self.bound:
            return None
        if node not in self.results:
            # Results of the step are tensors of their own: a gradient becomes a parameter's.
            known = found.root if found.is_whole else self.looks.get(found)
            if known is not None and known in self.bound:
                return known.name
        if found.root not in self.laid_out:
            return None
        if node not in self.results:
            self.looks[found] = node
        self.globals.setdefault("looked", looked())
        return f"looked({found.root.name}, {found.shape}, {found.strides}, {found.offset})"

    def waiting(self, text: str) -> str:
        """Return the text of a wait for a collective, recorded if the step is."""
        return f"record.waited(lambda: {text})" if "record" in self.globals else text

    def settle(self, tensor: int) -> None:
        """Emit waits for the collectives that use a tensor, before its memory is given up."""
        for result, used in self.sending.take(tensor):
            base = self.lowering.bases[result].name
            self.emit(self.waiting(f"{self.kernel(WAIT)}({base})"))
            self.landed(used)

    def landed(self, tensors: Iterable[int]) -> None:
        """Note the tensors of a collective that has been waited for."""
        device = self.lowering.device
        if device is not None and device.type == "cpu":
            self.held.update(tensors)

    def instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(op, outputs, implementation, in_place):
                self.compute(op, outputs, implementation, in_place)
            case Free(tensor):
                self.free(tensor)
            case SwapOut(tensor) if tensor in self.halves.moved:
                self.emit(f"homes.back({tensor})")
                self.swapping_out.add(tensor)
            case SwapIn(tensor) if tensor in self.halves.moved:
                node = self.lowering.bases.get(tensor)
                target = "" if node is None else f"{self.bind(node)} = "
                self.emit(f"{target}homes.bring({tensor})")
                self.swapping_in.add(tensor)
            case SwapOut(tensor):
                self.settle(tensor)
                if self.arena is not None:
                    self.arena.before(self, "swap out", (tensor,))
                base = self.value(self.lowering.bases[tensor])
                if is_on_host(self.lowering.bases[tensor].meta["val"], self.lowering.device):
                    self.emit(f"host_{tensor} = swap.stayed({base})")
                    return
                address = self.halves.host_placement.offsets[tensor]
                self.emit(f"host_{tensor} = swap.out({base}, {address}, lease)")
                self.swapping_out.add(tensor)
            case SwapIn(tensor):
                slot = self.arena.bring(self.position, tensor) if self.arena else ""
                self.laid_out.discard(self.lowering.bases[tensor])
                name = self.bind(self.lowering.bases[tensor])
                self.emit(f"{name} = swap.bring(host_{tensor}{slot})")
                self.swapping_in.add(tensor)
            case DropHost(tensor):
                if tensor in self.updating:
                    self.emit(f"homes.updated({tensor})")
                    self.updating.discard(tensor)
                self.arrive(tensor)
                self.emit(f"del host_{tensor}")
            case _:
                raise InvalidProgramError("a second loss boundary")

    def recorded(self, position: int, instruction: Instruction) -> None:
        """Emit an instruction at its position of the program, recorded if the step is."""
        self.position = position
        if "record" not in self.globals:
            self.instruction(instruction)
            return
        self.emit(f"record.begin({position})")
        self.instruction(instruction)
        self.emit("record.end()")

    def arrive(self, tensor: int) -> None:
        if tensor in self.swapping_in or tensor in self.swapping_out:
            moved = tensor in self.halves.moved
            self.emit(f"homes.wait({tensor})" if moved else f"swap.wait(host_{tensor})")
            if self.arena is not None and tensor in self.swapping_in:
                self.arena.brought(self, tensor)
            self.swapping_in.discard(tensor)
            self.swapping_out.discard(tensor)

    def compute(
        self, op: int, outputs: tuple[int, ...], implementation: str | None, in_place: int | None
    ) -> None:
        node = self.lowering.node_of(op, implementation)
        operator = self.lowering.graph.operators[op]
        chosen = variant(operator, implementation)
        if chosen.on_host:
            self.update_on_host(op)
            return
        reads = chosen.reads
        for tensor in reads:
            if tensor in self.swapping_in:
                self.arrive(tensor)
        if in_place is not None:
            self.settle(in_place)
        into = self.into_arena(op, node, outputs, reads)
        text = into or self.run_of(op, node, in_place)
        indent = ""
        if op in self.halves.repeated_random and op in self.ran:
            self.emit(f"with random.lock, random.replay(state_{op}):")
            indent = "    "
        elif operator.random:
            self.emit("with random.lock:")
            indent = "    "
            if op in self.halves.repeated_random:
                self.emit(f"    state_{op} = random.save()")
        self.ran.add(op)
        kept = unpacked(self.lowering, node, outputs)
        self.lay_out(node, kept, implementation is None and in_place is None and into is None)
        # Dropped results and workspace must go when the call ends, so it is waited for at once.
        at_once = operator.collective is not None and (
            len(kept) < len(operator.writes) or operator.workspace_bytes > 0
        )
        if at_once:
            text = self.waited_at_once(text, (*outputs, *operator.reads))
        note = f"  # {operator.module}" if operator.module else ""
        if self.arena is not None and into is not None:
            self.emit(f"{indent}{into}{note}")
            self.arena.after(self, operator.name)
        elif len(kept) == 1 and kept[0][0] is None:
            self.emit(f"{indent}{self.bind(kept[0][1])} = {text}{note}")
        elif len(kept) == 1:
            self.emit(f"{indent}{self.bind(kept[0][1])} = {text}[{kept[0][0]}]{note}")
        elif kept:
            self.emit(f"{indent}result = {text}{note}")
            for position, base, _ in kept:
                self.emit(f"{self.bind(base)} = result[{position}]")
            self.emit("del result")
        else:
            self.emit(f"{indent}{text}{note}")
        self.sending.start(op, () if at_once else outputs)
        if in_place is not None:
            if self.arena is not None:
                self.arena.taken(self, in_place, outputs, operator.name)
            self.held.discard(in_place)
            self.free(in_place)

    def into_arena(
        self, op: int, node: Node, outputs: tuple[int, ...], reads: Iterable[int]
    ) -> str | None:
        """Return the call that writes results at their addresses; None: they have none."""
        if self.arena is None:
            return None
        absent = self.absent(op, node)
        name = self.lowering.graph.operators[op].name
        self.arena.before(self, name, () if absent else reads)
        return self.arena.call(self, node, outputs, self.position, absent)

    def run_of(self, op: int, node: Node, in_place: int | None) -> str:
        """Return the call that makes an operator's results, or writes them over a tensor."""
        absent = self.absent(op, node)
        if absent and in_place is not None:
            return f"{absent}.over({self.argument(argument_in(self.lowering, node, in_place))})"
        if absent:
            return f"{absent}()"
        return self.call(node) if in_place is None else self.call_over(node, in_place)

    def absent(self, op: int, node: Node) -> str:
        """Return the name of what replaces a skipped operator's results; "": they are computed."""
        if self.lowering.nodes[op] not in self.halves.absence.nodes:
            return ""
        name = f"absent_{node.name}"
        self.globals[name] = self.halves.absence.result(node, self.lowering.storages[node])
        return name

    def lay_out(self, node: Node, kept: Iterable[tuple[Any, Node, int]], own: bool) -> None:
        """Note which results of a call have a certain layout; `own`: the call runs as captured."""
        for _, result, _ in kept:
            certain = own and is_laid_out_one_way(node, result)
            (self.laid_out.add if certain else self.laid_out.discard)(result)

    def waited_at_once(self, text: str, tensors: Iterable[int]) -> str:
        """Return the text of a collective's call that returns once its results have arrived."""
        self.globals["waited"] = waited
        self.landed(tensors)
        return self.waiting(f"waited({text})")

    def update_on_host(self, op: int) -> None:
        """Emit the optimizer's update on the host, which reads the host copy of the gradient."""
        _, _, gradient = gradient_of(self.lowering, op)
        self.updating.add(gradient)
        self.emit(f"homes.update({op}, host_{gradient})  # {self.lowering.nodes[op].args[0]}")

    def free(self, tensor: int) -> None:
        self.settle(tensor)
        if tensor in self.swapping_out or tensor in self.swapping_in:
            self.arrive(tensor)
        nodes = [n for n in self.variables.pop(tensor, []) if n in self.bound]
        self.bound.difference_update(nodes)
        names = ", ".join(dict.fromkeys(n.name for n in nodes))
        if names and tensor in self.held:
            self.globals["released"] = released
            self.emit(f"released({names})")
        self.held.discard(tensor)
        if names:
            self.emit(f"del {names}")
        if tensor in self.halves.moved:
            self.emit(f"homes.drop({tensor})")
        if self.arena is not None:
            self.arena.free(self, tensor)

    def primals(self) -> None:
        """Bind the step's arguments, but for parameters and state that are swapped in."""
        homes = {self.lowering.bases.get(tensor) for tensor in self.halves.moved}
        nodes = [p.node for p in self.halves.captured.primals]
        self.unpack([None if node in homes else node for node in nodes], "primals")

    def resume(self) -> None:
        """Bind parameters and state that the step before has left on the device."""
        for tensor in self.halves.from_before:
            node = self.lowering.bases.get(tensor)
            target = "" if node is None else f"{self.bind(node)} = "
            self.emit(f"{target}homes.resume({tensor})")

    def unpack(self, nodes: Iterable[Node | None], source: str) -> None:
        names = [self.bind(n) if n is not None else "_" for n in nodes]
        if names:
            self.emit(f"{', '.join(names)}, = {source}")

"""Generated straight-line Python for a program: one function per half of the step.

The source reads like the model: one line per kernel or view, `del` where the plan frees. It is
what runs; `memopt.executor.interpret` is the oracle it is tested against.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from memopt.errors import InvalidProgramError
from memopt.executor.values import Halves, kernel_of, unpacked
from memopt.models.program import Compute, DropHost, Free, Instruction, SwapIn, SwapOut
from memopt.models.variants import variant

_COUNTER = itertools.count()


class _Writer:
    """Emits one half; knows which nodes have a variable now."""

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
        self.ran: set[int] = set()

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
        arguments = [self.argument(a) for a in node.args]
        arguments += [f"{k}={self.argument(v)}" for k, v in node.kwargs.items()]
        return f"{self.kernel(node)}({', '.join(arguments)})"

    def kernel(self, node: Node) -> str:
        name = "".join(c if c.isalnum() else "_" for c in str(node.target))
        self.globals[name] = node.target
        return name

    def value(self, node: Node) -> str:
        """The variable of a node's value, made now if it is a view that has none."""
        if node in self.bound:
            return node.name
        if node.op == "get_attr":
            self.globals[node.name] = _attribute(self.halves, node)
            return node.name
        kernel = kernel_of(self.lowering, node)
        if kernel is not None:
            base = self.lowering.bases[self.lowering.storages[node][0]]  # type: ignore[index]
            if base in self.bound and base is not node:
                return base.name
            raise InvalidProgramError(f"{node.name} is read before {kernel.name} has run")
        if node not in self.lowering.views:
            raise InvalidProgramError(f"{node.name} is read while it is not on the device")
        text = self.call(node)
        self.emit(f"{self.bind(node)} = {text}")
        return node.name

    def instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(op, outputs, implementation):
                self.compute(op, outputs, implementation)
            case Free(tensor):
                self.free(tensor)
            case SwapOut(tensor):
                base = self.value(self.lowering.bases[tensor])
                address = self.halves.host_placement.offsets[tensor]
                self.emit(f"host_{tensor} = swap.out({base}, {address}, lease)")
                self.swapping_out.add(tensor)
            case SwapIn(tensor):
                self.emit(f"{self.bind(self.lowering.bases[tensor])} = swap.bring(host_{tensor})")
                self.swapping_in.add(tensor)
            case DropHost(tensor):
                self.arrive(tensor)
                self.emit(f"del host_{tensor}")
            case _:
                raise InvalidProgramError("a second loss boundary")

    def arrive(self, tensor: int) -> None:
        if tensor in self.swapping_in or tensor in self.swapping_out:
            self.swapping_in.discard(tensor)
            self.swapping_out.discard(tensor)
            self.emit(f"swap.wait(host_{tensor})")

    def compute(self, op: int, outputs: tuple[int, ...], implementation: str | None) -> None:
        node = self.lowering.node_of(op, implementation)
        for tensor in variant(self.lowering.graph.operators[op], implementation).reads:
            if tensor in self.swapping_in:
                self.arrive(tensor)
        text = self.call(node)
        indent = ""
        if op in self.halves.repeated_random and op in self.ran:
            self.emit(f"with random.replay(state_{op}):")
            indent = "    "
        elif self.lowering.graph.operators[op].random:
            self.emit("with random.lock:")
            indent = "    "
            if op in self.halves.repeated_random:
                self.emit(f"    state_{op} = random.save()")
        self.ran.add(op)
        kept = unpacked(self.lowering, node, outputs)
        module = self.lowering.graph.operators[op].module
        note = f"  # {module}" if module else ""
        if len(kept) == 1 and kept[0][0] is None:
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

    def free(self, tensor: int) -> None:
        if tensor in self.swapping_out or tensor in self.swapping_in:
            self.arrive(tensor)
        nodes = [n for n in self.variables.pop(tensor, []) if n in self.bound]
        self.bound.difference_update(nodes)
        if nodes:
            self.emit(f"del {', '.join(dict.fromkeys(n.name for n in nodes))}")

    def unpack(self, nodes: Iterable[Node | None], source: str) -> None:
        names = [self.bind(n) if n is not None else "_" for n in nodes]
        if names:
            self.emit(f"{', '.join(names)}, = {source}")


def _attribute(halves: Halves, node: Node) -> Any:
    value: Any = halves.captured.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _forward(halves: Halves, names: dict[Any, str], globals_: dict[str, Any]) -> _Writer:
    writer = _Writer(halves, names, globals_)
    writer.unpack([p.node for p in halves.captured.primals], "primals")
    if halves.host_placement.offsets:
        writer.emit("lease = swap.lease()")
    for instruction in halves.forward:
        writer.instruction(instruction)
    outputs = [writer.argument(o) for o in halves.captured.forward_outputs]
    bases = [halves.lowering.bases.get(t) for t in halves.carried]
    saved = [writer.value(b) for b in bases if b is not None]
    saved += [f"host_{t}" for t in halves.hosted_at_boundary]
    saved += [f"state_{op}" for op in halves.saved_states]
    if halves.swaps_out_late:
        saved.append("lease")
    writer.emit(f"return [{', '.join(outputs)}], [{', '.join(saved)}]")
    return writer


def _backward(forward: _Writer, names: dict[Any, str], globals_: dict[str, Any]) -> _Writer:
    halves = forward.halves
    writer = _Writer(halves, names, globals_)
    writer.swapping_out = set(forward.swapping_out)
    writer.swapping_in = set(forward.swapping_in)
    writer.ran = {i.op for i in halves.forward if isinstance(i, Compute)}
    writer.unpack([p.node for p in halves.captured.primals], "primals")
    writer.unpack([None, *halves.captured.tangents], "arguments")
    writer.emit("del _")
    writer.emit("arguments.clear()")
    bases = [halves.lowering.bases.get(t) for t in halves.carried]
    targets = [writer.bind(b) for b in bases if b is not None]
    targets += [f"host_{t}" for t in halves.hosted_at_boundary]
    targets += [f"state_{op}" for op in halves.saved_states]
    if halves.swaps_out_late:
        targets.append("lease")
    if targets:
        writer.emit(f"{', '.join(targets)}, = saved")
    writer.emit("saved.clear()")
    for instruction in halves.backward:
        writer.instruction(instruction)
    gradients = [writer.argument(g) for g in halves.captured.gradients]
    writer.emit(f"return ({', '.join(gradients)},)" if gradients else "return ()")
    return writer


def generate(halves: Halves, swap: Any, random: Any) -> tuple[Any, Any, str]:
    """Compile a program to two Python functions.

    Args:
        halves: the program with its captured model.
        swap: object with lease/out/bring/wait (see `memopt.executor.swap`).
        random: object with lock/save/replay (see `memopt.executor.random_state`).

    Returns:
        (forward, backward, source): `forward(primals) -> (outputs, saved)`;
        `backward(primals, arguments, saved) -> gradients`, where `arguments` is the token and
        the tangents, emptied at once, and so is `saved`.
    """
    globals_: dict[str, Any] = {"swap": swap, "random": random, "torch": torch}
    names: dict[Any, str] = {}
    forward = _forward(halves, names, globals_)
    backward = _backward(forward, names, globals_)
    source = "\n".join(
        [
            "def forward(primals):",
            *forward.lines,
            "",
            "",
            "def backward(primals, arguments, saved):",
            *backward.lines,
            "",
        ]
    )
    filename = f"<memopt plan {next(_COUNTER)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    # The source is written above from the captured graph; no file content reaches it.
    exec(compile(source, filename, "exec"), globals_)
    return globals_["forward"], globals_["backward"], source

"""Writes the expressions of generated code: a name, a view, a kernel's call."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from memopt.errors import InvalidProgramError
from memopt.executor.direct_calls import direct, runs_below_autograd
from memopt.executor.values import Halves, argument_in, attribute_of, base_of, kernel_of
from memopt.executor.views import Look, look_of, looked, looked_at_plain, seen_outside
from memopt.step.in_place import in_place_call
from memopt.step.kernel import FusedKernel
from memopt.torch_private.modes import below_autograd


class ExpressionWriter:
    """Emits lines and tracks which nodes have a variable.

    Args:
        halves: the program with its captured model.
        names: constants → their names, shared by both halves.
        globals_: what the code reads by name.
        direct: whether the code is for plain tensors with nobody looking on: it calls kernels
            directly, below autograd (`memopt.executor.direct_calls`).
    """

    def __init__(
        self, halves: Halves, names: dict[Any, str], globals_: dict[str, Any], direct: bool
    ) -> None:
        self.halves = halves
        self.lowering = halves.lowering
        self.names = names
        self.globals = globals_
        self.direct = direct
        self.lines: list[str] = []
        self.bound: set[Node] = set()
        self.variables: dict[int, list[Node]] = {}
        # Results whose layout is certain, and the views that were made of them.
        self.laid_out: set[Node] = set()
        self.looks: dict[Look, Node] = {}
        captured = halves.captured
        outputs = {one for one in captured.forward_outputs if isinstance(one, Node)}
        self.results = {*outputs, *captured.gradients, *captured.other_results}
        self.outside = seen_outside(outputs, self.lowering.views)
        self._below = False
        self.above = False
        """Whether what is emitted now is for autograd to see."""
        self._nested = False
        globals_["below_autograd"] = below_autograd
        globals_["looked"] = looked_at_plain() if direct else looked()

    def emit(self, line: str, *, above: bool = False) -> None:
        """Add a line. With `above` it runs above autograd: it runs no kernel, or autograd must see
        what it does."""
        below = self.direct and not (above or self.above)
        if below and not self._below:
            self.lines.append("    with below_autograd():")
        self._below = below
        self.lines.append(f"{'        ' if below else '    '}{line}")

    def slot_of(self, found: Look) -> str:
        """Return a view of a slot in an arena, which is made once for all steps; "": of none."""
        return ""

    def bind(self, node: Node) -> str:
        """Note that a node's variable holds its value now, and return its name."""
        self.bound.add(node)
        for tensor in self.lowering.storages.get(node, ()):
            if tensor is not None:
                self.variables.setdefault(tensor, []).append(node)
        return node.name

    def constant(self, value: Any) -> str:
        """Return the text of a constant."""
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
        """Return the text of an argument, after emitting lines that make it."""
        if isinstance(value, Node):
            return self.value(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.argument(v) for v in value)
            # Python makes a tuple of numbers once.
            fixed = self.direct and all(isinstance(v, (bool, int, float)) for v in value)
            if isinstance(value, list) and not fixed:
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in value.items()) + "}"
        return self.constant(value)

    def call(self, node: Node) -> str:
        """Return the call, or the unpacking, that makes a node's value."""
        if node.target is operator.getitem:
            return f"{self.argument(node.args[0])}[{node.args[1]!r}]"
        return self.call_of(node.target, node.args, node.kwargs)

    def call_over(self, node: Node, tensor: int) -> str:
        """Return the call that writes a node's result over its argument in storage `tensor`."""
        return self.call_of(*in_place_call(node, argument_in(self.lowering, node, tensor)))

    def call_of(self, target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        """Return a call's text, after emitting lines that make its arguments."""
        args = tuple(args)
        texts = [self.argument(a) for a in args]
        if self.direct and isinstance(target, FusedKernel) and target.run is not None:
            return f"{self.named(str(target), target.run)}([{', '.join(texts)}])"
        texts += [f"{k}={self.argument(v)}" for k, v in kwargs.items()]
        return f"{self.kernel(target, args, kwargs)}({', '.join(texts)})"

    def kernel(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name of a callee for these arguments."""
        return self.named(str(target), direct(target, args, kwargs) if self.direct else target)

    def named(self, label: str, callee: Any) -> str:
        """Return the name of a callee. Two of one label (memopt's form of an operator and torch's)
        have two names."""
        plain = "".join(c if c.isalnum() else "_" for c in label)
        names = itertools.chain([plain], (f"{plain}_{i}" for i in itertools.count(2)))
        return next(n for n in names if self.globals.setdefault(n, callee) == callee)

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
        if self._nested:
            return self.call(node)
        text = self.arrived(node, self.look(node) or self.call(node))
        above = node in self.outside or not runs_below_autograd(node.target)
        self.emit(f"{self.bind(node)} = {text}", above=above)
        return node.name

    def arrived(self, _node: Node, text: str) -> str:
        """Return the text of a view, after emitting lines for what the view waits for."""
        return text

    def look(self, node: Node) -> str | None:
        """Return a view as one strided view of a result, or as a name that it already has; None: it
        must be made by the captured view calls. They also make it if the result turns out to have
        another layout than captured."""
        found = None if node in self.outside else look_of(node, self.lowering.views)
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
        certain = found.root in self.laid_out
        if not certain and not self.direct:
            return None
        if node not in self.results:
            self.looks[found] = node
            slot = self.slot_of(found)
            if slot:
                return slot
        root = found.root.name
        text = f"looked({root}, {found.shape}, {found.strides}, {found.offset})"
        if certain:
            return text
        strides = tuple(found.root.meta["val"].stride())
        return f"{text} if {root}.stride() == {strides} else {self.nested(node)}"

    def nested(self, node: Node) -> str:
        """Return the captured view calls that make a view, one inside the other."""
        self._nested = True
        try:
            return self.call(node)
        finally:
            self._nested = False

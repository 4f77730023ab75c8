"""Writes one half of a step as Python: a line per kernel or view, `del` where the plan frees."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from memopt.errors import InvalidProgramError
from memopt.executor.arena_code import ArenaWriter
from memopt.executor.direct_calls import runs_below_autograd
from memopt.executor.expressions import ExpressionWriter
from memopt.executor.host_updates import gradient_of
from memopt.executor.values import Halves, argument_in, unpacked
from memopt.executor.views import Look, is_laid_out_one_way
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, DropHost, Free, Instruction, SwapIn, SwapOut
from memopt.step.backend import is_on_host
from memopt.step.build import Lowering
from memopt.step.collectives import WAIT, give_way, has_scratch, is_wait, let_go, waited
from memopt.torch_private.tensors import holders

_LONGEST_S = 1.0


def released(*tensors: torch.Tensor) -> None:
    """Wait until nothing but these tensors holds their storage, for a second at most.

    A collective on CPU (gloo) runs in a thread of its group, which holds its tensors until a moment
    after those that wait for it go on. Freed meanwhile, they would stay in memory for that moment.
    """
    storage = tensors[0].untyped_storage()
    # A wait returns the tensor that it waited for.
    alone = len(set(map(id, tensors))) + 1
    give_way(lambda: holders(storage) <= alone, _LONGEST_S)


class Writer(ExpressionWriter):
    """Emits one half of a step."""

    def __init__(
        self, halves: Halves, names: dict[Any, str], globals_: dict[str, Any], direct: bool
    ) -> None:
        super().__init__(halves, names, globals_, direct)
        self.arena: ArenaWriter | None = None
        self.swapping_out: set[int] = set()
        self.swapping_in: set[int] = set()
        self.updating: set[int] = set()
        self.sending = UnderWay(halves.lowering)
        # Tensors of CPU collectives that a thread of the process group may still hold.
        self.held: set[int] = set()
        self.ran: set[int] = set()
        self.position = 0
        # Recorded, every update is one instruction, and where somebody looks on, as planned.
        alone = "record" in globals_ or not direct
        self.together = {} if alone else dict(halves.together)
        self.done = {p for first, every in self.together.items() for p in every if p != first}

    def slot_of(self, found: Look) -> str:
        return self.arena.look(found) if self.direct and self.arena is not None else ""

    def arrived(self, node: Node, text: str) -> str:
        if not is_wait(node.target):
            return text
        for other in self.sending.beside(node):
            self.settle(other)
        used = self.sending.waited(node)
        self.landed(used)
        return self.waiting(self.last_wait(text, used[0]) if used else text)

    def last_wait(self, text: str, result: int) -> str:
        """Return the text of a wait, which also waits until gloo has let go of the collective's
        tensors if no other result of it is pending."""
        if self.sending.pending(result):
            return text
        return f"{self.named('let_go', let_go)}({text})"

    def waiting(self, text: str) -> str:
        """Return the text of a wait for a collective, recorded if the step is."""
        return f"record.waited(lambda: {text})" if "record" in self.globals else text

    def settle(self, tensor: int) -> None:
        """Emit waits for the collectives that use a tensor, before its memory is given up."""
        taken = self.sending.take(tensor)
        for position, (result, used) in enumerate(taken):
            base = self.lowering.bases[result].name
            text = f"{self.named(str(WAIT), WAIT)}({base})"
            if not self.sending.same(result, (later for later, _ in taken[position + 1 :])):
                text = self.last_wait(text, result)
            self.emit(self.waiting(text), above=True)
            self.landed(used)

    def landed(self, tensors: Iterable[int]) -> None:
        """Note the tensors of a collective that has been waited for."""
        device = self.lowering.device
        if device is not None and device.type == "cpu":
            self.held.update(tensors)

    def instruction(self, instruction: Instruction) -> None:
        match instruction:
            case Compute() if self.position in self.done:
                return
            case Compute() if self.position in self.together:
                self.update_together(self.together[self.position])
            case Compute(op, outputs, implementation, in_place):
                self.compute(op, outputs, implementation, in_place)
            case Free(tensor):
                self.free(tensor)
            case SwapOut(tensor) if tensor in self.halves.moved:
                self.emit(f"homes.back({tensor})", above=True)
                self.swapping_out.add(tensor)
            case SwapIn(tensor) if tensor in self.halves.moved:
                node = self.lowering.bases.get(tensor)
                target = "" if node is None else f"{self.bind(node)} = "
                self.emit(f"{target}homes.bring({tensor})", above=True)
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
                    self.emit(f"homes.updated({tensor})", above=True)
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
            wait = f"homes.wait({tensor})" if moved else f"swap.wait(host_{tensor})"
            self.emit(wait, above=moved)
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
        self.above = not runs_below_autograd(node.target)
        into = self.into_arena(op, node, outputs, reads)
        text = into or self.run_of(op, node, in_place)
        indent = "    " if operator.random else ""
        if self.halves.segments is not None and self.position in self.halves.segments.positions:
            text, indent = self.between_graphs(op, text), ""
        elif operator.random:
            self.draw(op)
        self.ran.add(op)
        kept = unpacked(self.lowering, node, outputs)
        self.lay_out(node, kept, implementation is None and in_place is None and into is None)
        # Dropped results and workspace must go when the call ends, so it is waited for at once.
        at_once = operator.collective is not None and (
            len(kept) < len(operator.writes)
            or has_scratch(operator.collective, self.lowering.device)
        )
        if at_once:
            text = self.waited_at_once(text, (*outputs, *operator.reads))
        note = f"  # {operator.module}" if operator.module else ""
        if self.arena is not None and into is not None:
            self.emit(f"{indent}{text}{note}")
            self.arena.after(self, operator.name)
        elif len(kept) == 1 and kept[0][0] is None:
            self.emit(f"{indent}{self.bind(kept[0][1])} = {text}{note}")
        elif len(kept) == 1:
            self.emit(f"{indent}{self.bind(kept[0][1])} = {text}[{kept[0][0]}]{note}")
        elif kept:
            names = ["_"] * len(self.lowering.storages[node])
            for position, base, _ in kept:
                names[position] = self.bind(base)
            self.emit(f"{indent}{', '.join(names)} = {text}{note}")
            if "_" in names:
                self.emit("del _")
        else:
            self.emit(f"{indent}{text}{note}")
        self.sending.start(op, () if at_once else outputs)
        self.above = False
        if in_place is not None:
            if self.arena is not None:
                self.arena.taken(self, in_place, outputs, operator.name)
            self.held.discard(in_place)
            self.free(in_place)

    def draw(self, op: int) -> None:
        """Emit what stands above the call of a random operator."""
        repeated = op in self.halves.repeated_random
        if repeated and op in self.ran:
            self.emit(f"with random.lock, random.replay(state_{op}):")
            return
        self.emit("with random.lock:")
        if repeated:
            self.emit(f"    state_{op} = random.save()")

    def between_graphs(self, op: int, text: str) -> str:
        """Return a call that runs between two captured graphs, if they are captured."""
        used = {one.id for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Name)}
        given = ", ".join(sorted(used & {"slots", *(node.name for node in self.bound)}))
        state, first = "None", op not in self.ran
        if op in self.halves.repeated_random:
            state = f"state_{op}"
            if first:
                self.emit(f"{state} = bytearray()")
        below = self.direct and not self.above
        values = f"({given},)" if given else "()"
        return f"segments.run(lambda {given}: {text}, {values}, {state}, {first}, {below})"

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
        """Note which results of a call have a known layout; `own`: the call runs as captured."""
        for _, result, _ in kept:
            certain = own and is_laid_out_one_way(node, result)
            (self.laid_out.add if certain else self.laid_out.discard)(result)

    def waited_at_once(self, text: str, tensors: Iterable[int]) -> str:
        """Return the text of a collective's call that returns once its results have arrived."""
        self.globals["waited"] = waited
        self.landed(tensors)
        return self.waiting(f"waited({text})")

    def update_together(self, positions: Iterable[int]) -> None:
        """Emit one call for several updates."""
        pairs = []
        for position in positions:
            run = self.halves.program.instructions[position]
            assert isinstance(run, Compute)
            node = self.lowering.node_of(run.op, run.implementation)
            operator = self.lowering.graph.operators[run.op]
            for tensor in operator.reads:
                self.arrive(tensor)
            if self.arena is not None:
                self.arena.before(self, operator.name, operator.reads)
            name, gradient, value = (*node.args, None)[:3]
            pairs.append(f"({name!r}, {self.argument(gradient)}, {self.argument(value)})")
        named = "".join(f", {key}={self.argument(one)}" for key, one in node.kwargs.items())
        update = self.named(str(node.target), node.target)
        self.emit(f"{update}.together(({', '.join(pairs)}){named})", above=True)

    def update_on_host(self, op: int) -> None:
        """Emit the optimizer's update on the host, which reads the host copy of the gradient."""
        _, _, gradient = gradient_of(self.lowering, op)
        self.updating.add(gradient)
        name = self.lowering.nodes[op].args[0]
        self.emit(f"homes.update({op}, host_{gradient})  # {name}", above=True)

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
            self.emit(f"homes.drop({tensor})", above=True)
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
            self.emit(f"{target}homes.resume({tensor})", above=True)

    def unpack(self, nodes: Iterable[Node | None], source: str) -> None:
        names = [self.bind(n) if n is not None else "_" for n in nodes]
        if names:
            self.emit(f"{', '.join(names)}, = {source}", above=True)


class UnderWay:
    """The collectives that have started and not been waited for yet.

    A wait precedes the first reader of a result. It also precedes the end or reuse of memory that a
    collective reads or writes, as in `memopt.programs.replay`.
    """

    def __init__(self, lowering: Lowering, before: UnderWay | None = None) -> None:
        self._lowering = lowering
        self._reads: dict[int, tuple[int, ...]] = {} if before is None else dict(before._reads)
        self._of: dict[int, int] = {} if before is None else dict(before._of)
        """Result → the operator that writes it."""

    def start(self, op: int, results: tuple[int, ...]) -> None:
        """Note that an operator has run and that the program keeps `results`."""
        operator = self._lowering.graph.operators[op]
        if operator.collective is not None:
            self._reads.update(dict.fromkeys(results, operator.reads))
            self._of.update(dict.fromkeys(results, op))

    def waited(self, wait: Node) -> tuple[int, ...]:
        """Note a wait for a collective; return the tensors that it read or wrote, () if it was not
        under way."""
        (result,) = self._lowering.storages[wait]
        assert result is not None
        reads = self._reads.pop(result, None)
        return () if reads is None else (result, *reads)

    def beside(self, wait: Node) -> list[int]:
        """Return other pending results of the collective that this node waits for: while one is
        pending, all tensors of the collective are held."""
        (result,) = self._lowering.storages[wait]
        if result not in self._reads:
            return []
        return [t for t in self._reads if t != result and self._of[t] == self._of[result]]

    def same(self, result: int, others: Iterable[int]) -> bool:
        """Return whether one of `others` is a result of the same collective."""
        return any(self._of[other] == self._of[result] for other in others)

    def pending(self, result: int) -> bool:
        """Return whether a result of the same collective has not been waited for."""
        return self.same(result, self._reads)

    def take(self, tensor: int) -> list[tuple[int, tuple[int, ...]]]:
        """Remove the pending results of collectives that use a tensor; return each with all tensors
        of its collective."""
        found = [t for t, reads in self._reads.items() if tensor == t or tensor in reads]
        return [(result, (result, *self._reads.pop(result))) for result in found]

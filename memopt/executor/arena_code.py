"""Writes the lines of generated code that use an arena."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from memopt.executor.arena import Arenas
from memopt.executor.expressions import ExpressionWriter
from memopt.executor.values import unpacked
from memopt.executor.views import Look
from memopt.step.signature import values_of


class ArenaWriter:
    """Writes the calls whose results have slots and, with `checked`, the lines that
    `memopt.executor.arena_check` needs. Shared by both halves, as it tracks the slots in use."""

    def __init__(self, arenas: Arenas, checked: bool) -> None:
        self.arenas = arenas
        self.layout = arenas.layout
        self.checked = checked
        self.used: dict[int, int] = {}
        """Live tensor → its slot."""
        self.slots: dict[Node, int] = {}
        """Node whose variable is a slot itself → that slot."""
        self.written: list[int] = []
        self.transient: list[int] = []

    def begin(self, writer: ExpressionWriter) -> None:
        """Emit the first lines of the forward."""
        writer.emit("arena = arenas.lease()")
        self.take(writer)

    def take(self, writer: ExpressionWriter) -> None:
        """Emit the line that takes the slots, and the views that were made with them."""
        slots = "arenas.complete(arena.slots)" if writer.direct else "arena.slots"
        writer.emit(f"slots = {slots}")

    def look(self, found: Look) -> str:
        """Return a view of a slot, which is made once for all steps; "": it is of no slot."""
        slot = self.slots.get(found.root)
        if slot is None:
            return ""
        return f"slots[{self.arenas.view(slot, found.shape, found.strides, found.offset)}]"

    def call(
        self,
        writer: ExpressionWriter,
        node: Node,
        outputs: Iterable[int],
        position: int,
        absent: str = "",
    ) -> str | None:
        """Return a kernel's call that writes into its slots, after emitting lines that bind its
        outputs; None if no result has a slot."""
        held = self.layout.lowering.storages[node]
        slots = [self.layout.at.get((position, t)) if t is not None else None for t in held]
        if node not in self.layout.out_variants or all(slot is None for slot in slots):
            return None
        variant = self.layout.out_variants[node]
        arguments, targets = [], []
        if not absent:
            arguments = [writer.argument(a) for a in node.args]
            arguments += [f"{k}={writer.argument(v)}" for k, v in node.kwargs.items()]
        kept = {p or 0: base for p, base, _ in unpacked(self.layout.lowering, node, outputs)}
        for i, (slot, like) in enumerate(zip(slots, values_of(node), strict=True)):
            target = f"slots[{slot}]" if slot is not None else _empty(writer, like)
            if i in kept:
                name = writer.bind(kept[i])
                writer.emit(f"{name} = {target}")
                target = name
                if slot is not None:
                    self.slots[kept[i]] = slot
            targets.append(target)
        self._note(held, slots, set(outputs))
        if absent:
            return f"{absent}.into({', '.join(targets)})"
        arguments += [f"{n}={t}" for n, t in zip(variant.names, targets, strict=True)]
        into = dict(zip(variant.names, values_of(node), strict=True))
        if variant.composed:
            name = writer.named(variant.label, variant.target)
        else:
            name = writer.kernel(variant.target, node.args, {**node.kwargs, **into})
        return f"{name}({', '.join(arguments)})"

    def _note(
        self, held: tuple[int | None, ...], slots: list[int | None], outputs: set[int]
    ) -> None:
        self.written = [slot for slot in slots if slot is not None]
        self.transient = []
        for tensor, slot in zip(held, slots, strict=True):
            if tensor is not None and slot is not None:
                if tensor in outputs:
                    self.used[tensor] = slot
                else:
                    self.transient.append(slot)

    def bring(self, position: int, tensor: int) -> str:
        """Return the argument that names a swap-in's slot; "" if it has none."""
        slot = self.layout.at.get((position, tensor))
        if slot is None:
            return ""
        self.used[tensor] = slot
        return f", slots[{slot}]"

    def before(self, writer: ExpressionWriter, what: str, reads: Iterable[int]) -> None:
        """If checked, emit a check of the tensors that are about to be read."""
        slots = [self.used[t] for t in dict.fromkeys(reads) if t in self.used]
        if self.checked and slots:
            writer.emit(f"arena.read({slots!r}, {what!r})")

    def after(self, writer: ExpressionWriter, what: str) -> None:
        """If checked, emit a note of the slots that the last call has written."""
        if self.checked and self.written:
            writer.emit(f"arena.wrote({self.written!r}, {what!r})")
            if self.transient:
                writer.emit(f"arena.freed({self.transient!r})")
        self.written = []

    def brought(self, writer: ExpressionWriter, tensor: int) -> None:
        """If checked, emit a note that a swap-in has arrived in its slot."""
        if self.checked and tensor in self.used:
            writer.emit(f"arena.wrote([{self.used[tensor]}], 'swap in')")

    def taken(
        self, writer: ExpressionWriter, tensor: int, outputs: Iterable[int], what: str
    ) -> None:
        """Move a tensor's slot to the outputs that were computed in place over it."""
        slot = self._leave(tensor)
        if slot is not None:
            self.used |= dict.fromkeys(outputs, slot)
            self.written, self.transient = [slot], []
            self.after(writer, what)

    def _leave(self, tensor: int) -> int | None:
        """Record that a tensor has left its slot; return the slot's index, None if it had none."""
        self.slots.pop(self.layout.lowering.bases.get(tensor), None)  # type: ignore[arg-type]
        return self.used.pop(tensor, None)

    def free(self, writer: ExpressionWriter, tensor: int) -> None:
        """End a tensor's lifetime."""
        slot = self._leave(tensor)
        if self.checked and slot is not None:
            writer.emit(f"arena.freed([{slot}])")


def _empty(writer: ExpressionWriter, like: Tensor) -> str:
    """Return an allocation for a result that leaves the step."""
    writer.globals["empty_strided"] = torch.empty_strided
    shape, stride = writer.argument(tuple(like.shape)), writer.argument(like.stride())
    dtype, device = writer.argument(like.dtype), writer.argument(like.device)
    return f"empty_strided({shape}, {stride}, dtype={dtype}, device={device})"

"""Running at planned addresses: one allocation per step, each placed tensor a view of it.

An arena is a byte tensor. A placed lifetime is a *slot*: a tensor with a storage of its own over
the arena's bytes at the planned offset, so that kernels see what an allocated tensor would show
them (some look at the whole storage). Slots own nothing: a step's lease holds the arena and dies
with the step's state, whether the backward has run, failed or never came. Steps under way at once
have arenas of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from memopt.errors import InvalidProgramError
from memopt.executor.out_variants import OutVariant, out_variants_of
from memopt.executor.views import looked_at_plain
from memopt.programs.instructions import Compute, Program
from memopt.programs.placed import ALIGNMENT_BYTES
from memopt.step.backend import is_on_host
from memopt.step.build import Lowering
from memopt.step.signature import values_of
from memopt.torch_private.modes import profiler_looks_on
from memopt.torch_private.tensors import storage_at

_KNOWN_ADDRESSES = 8


@dataclass(frozen=True)
class Slot:
    """A placed lifetime: a tensor and its address in the arena.

    Attributes:
        tensor: its index in the graph.
        offset_bytes: its first byte in the arena.
        like: a fake tensor with its shape, strides and dtype.
    """

    tensor: int
    offset_bytes: int
    like: Tensor

    @property
    def end_bytes(self) -> int:
        """First byte after the slot."""
        return self.offset_bytes + self.like.untyped_storage().nbytes()


@dataclass(frozen=True)
class ArenaLayout:
    """The slots of a placed program, and how its kernels write into them.

    Attributes:
        slots: the lifetimes whose kernels can write at an address.
        at: (instruction, tensor) → index of its slot.
        out_variants: kernel call → the variant that writes into its slots.
        lowering: the graph's map to FX nodes.
        extent_bytes: size of the arena.
        device: the device of the arena.
    """

    slots: tuple[Slot, ...]
    at: Mapping[tuple[int, int], int]
    out_variants: Mapping[Node, OutVariant]
    lowering: Lowering
    extent_bytes: int
    device: torch.device

    def name(self, slot: int) -> str:
        """Return the tensor of a slot and its addresses, for messages."""
        one = self.slots[slot]
        tensor = self.lowering.graph.tensors[one.tensor].name
        return f"{tensor!r} at [{one.offset_bytes}, {one.end_bytes})"


def arena_layout(lowering: Lowering, program: Program, device: torch.device) -> ArenaLayout | None:
    """Return the slots of a placed program; None if no lifetime can have one.

    Lifetimes whose kernel cannot write at an address stay with the allocator. So do results,
    since they leave the step.

    Raises:
        InvalidProgramError: an offset is no multiple of the alignment that kernels expect.
    """
    if not program.offsets:
        return None
    out_variants = out_variants_of(lowering)
    results = lowering.graph.kept | set(lowering.graph.tangents)
    runs = dict(program.computes)
    slots: list[Slot] = []
    at: dict[tuple[int, int], int] = {}
    for position, tensor, offset in program.offsets:
        like = _like(lowering, runs.get(position), out_variants, tensor)
        if tensor in results or like is None or like.numel() == 0 or is_on_host(like, device):
            continue
        if offset % ALIGNMENT_BYTES:
            name = lowering.graph.tensors[tensor].name
            raise InvalidProgramError(
                f"{name!r} has the address {offset}, but kernels expect multiples of "
                f"{ALIGNMENT_BYTES} bytes; place with alignment={ALIGNMENT_BYTES}"
            )
        at[position, tensor] = len(slots)
        slots.append(Slot(tensor, offset, like))
    if not slots:
        return None
    extent_bytes = max(slot.end_bytes for slot in slots)
    return ArenaLayout(tuple(slots), at, out_variants, lowering, extent_bytes, device)


def _like(
    lowering: Lowering,
    run: Compute | None,
    out_variants: Mapping[Node, OutVariant],
    tensor: int,
) -> Tensor | None:
    """Return the fake tensor of a lifetime if its kernel can write at an address, else None. The
    lifetime begins with `run`; with a swap-in if that is None."""
    if run is None:
        base = lowering.bases.get(tensor)
        value: Any = base.meta.get("val") if base is not None else None
        return value if isinstance(value, Tensor) else None
    if run.in_place is not None:
        return None
    node = lowering.node_of(run.op, run.implementation)
    if node not in out_variants:
        return None
    found: Tensor = values_of(node)[lowering.storages[node].index(tensor)]
    return found


@dataclass
class ArenaLease:
    """One step's arena."""

    memory: Tensor
    slots: list[Tensor]
    arenas: Arenas

    def __del__(self) -> None:
        self.arenas.keep(self.memory)


class ArenaFamily:
    """Programs of which at most one runs at a time, such as those of one model for several shapes.
    They share one arena, as large as the largest needs.

    Attributes:
        extent_bytes: size of that arena.
        limit_bytes: the largest budget of its programs; None: one of them has no limit.
        idle: the last step's arena, kept for the next one.
    """

    def __init__(self) -> None:
        self.extent_bytes = 0
        self.limit_bytes: int | None = 0
        self.idle: list[Tensor] = []
        self._outside_bytes = 0

    def admit(self, extent_bytes: int, outside_bytes: int, budget_bytes: int | None) -> bool:
        """Let a program share the arena, which grows if it must; return False if that would make
        one of the programs exceed its budget.

        Args:
            extent_bytes: size of the program's own arena.
            outside_bytes: the most that it needs outside of its arena, resident included.
            budget_bytes: its budget; None: no limit.
        """
        extent_bytes = max(extent_bytes, self.extent_bytes)
        limit_bytes, most_bytes = self._room(outside_bytes, budget_bytes)
        if most_bytes is not None and extent_bytes > most_bytes:
            return False
        self.limit_bytes = limit_bytes
        self._outside_bytes = max(self._outside_bytes, outside_bytes)
        if extent_bytes > self.extent_bytes:
            self.extent_bytes = extent_bytes
            self.idle.clear()
        return True

    def narrower(
        self, extent_bytes: int, outside_bytes: int, budget_bytes: int | None
    ) -> int | None:
        """Return the budget for planning a program again so that it is admitted; None if it is
        admitted as it is or no budget helps. Takes the arguments of `admit`."""
        _, most_bytes = self._room(outside_bytes, budget_bytes)
        if most_bytes is None or max(extent_bytes, self.extent_bytes) <= most_bytes:
            return None
        return None if self.extent_bytes > most_bytes else most_bytes + outside_bytes

    def _room(self, outside_bytes: int, budget_bytes: int | None) -> tuple[int | None, int | None]:
        """Return the limit with one more program, and the arena's largest size; None: no limit."""
        if self.limit_bytes is None or budget_bytes is None:
            return None, None
        limit_bytes = max(self.limit_bytes, budget_bytes)
        return limit_bytes, limit_bytes - max(self._outside_bytes, outside_bytes)


class Arenas:
    """Makes the arenas of an installed program, or of its family.

    On the CPU the last step's memory is kept for the next one: torch gives a large allocation back
    to the operating system, and touching every page anew takes a tenth of a step. Only the program
    (or family) that ran last keeps memory. While torch's profiler is active none is kept, so that
    it sees every step's arena. CUDA's allocator caches freed memory itself.
    """

    _keeper: ClassVar[weakref.ref[ArenaFamily] | None] = None

    def __init__(self, layout: ArenaLayout, family: ArenaFamily | None = None) -> None:
        self.layout = layout
        self.family = ArenaFamily() if family is None else family
        if family is None:
            self.family.admit(layout.extent_bytes, 0, None)
        self._known: dict[int, list[Tensor]] = {}
        """Address of an arena → its slots; the allocator often returns the same address again."""
        self._views: dict[tuple[int, tuple[int, ...], tuple[int, ...], int], int] = {}
        self._view = looked_at_plain()

    def view(self, slot: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> int:
        """Return the position, in what `complete` gives, of a view of a slot."""
        key = slot, shape, strides, offset
        return self._views.setdefault(key, len(self.layout.slots) + len(self._views))

    def complete(self, slots: list[Tensor]) -> list[Tensor]:
        """Return an arena's slots, followed by all views of them; these are made once."""
        made = len(slots) - len(self.layout.slots)
        if made < len(self._views):
            for slot, shape, strides, offset in list(self._views)[made:]:
                slots.append(self._view(slots[slot], shape, strides, offset))
        return slots

    def lease(self) -> ArenaLease:
        """Lease an arena for one step."""
        memory = self.memory()
        return ArenaLease(memory, self.slots_at(memory.data_ptr()), self)

    def memory(self) -> Tensor:
        """Return the bytes of an arena: those of the last step, or new ones."""
        family = self.family
        if profiler_looks_on():
            family.idle.clear()
        self._drop_others()
        try:
            # Of two steps at once only one gets the idle arena: pop is atomic.
            return family.idle.pop()
        except IndexError:
            return torch.empty(family.extent_bytes, dtype=torch.uint8, device=self.layout.device)

    def keep(self, memory: Tensor) -> None:
        """Keep the arena of a step that is over, if the next one can use it."""
        family = self.family
        if self.layout.device.type != "cpu" or profiler_looks_on():
            return
        if memory.numel() < family.extent_bytes:
            return  # The family has grown since.
        self._drop_others()
        Arenas._keeper = weakref.ref(family)
        family.idle[:] = [memory]

    def _drop_others(self) -> None:
        before = Arenas._keeper() if Arenas._keeper is not None else None
        if before is not None and before is not self.family:
            before.idle.clear()

    def slots_at(self, address: int) -> list[Tensor]:
        """Return the placed tensors of an arena at an address."""
        # Two living arenas have two addresses, so slots are never shared by two steps. Each of the
        # dictionary's operations is atomic; no two of them need to be atomic together.
        slots = self._known.get(address)
        if slots is None:
            slots = [self._slot(address, slot) for slot in self.layout.slots]
            self._known[address] = slots
            for known in list(self._known)[:-_KNOWN_ADDRESSES]:
                self._known.pop(known, None)
        return slots

    def _slot(self, address: int, slot: Slot) -> Tensor:
        like = slot.like
        size_bytes = like.untyped_storage().nbytes()
        storage = storage_at(address + slot.offset_bytes, self.layout.device, size_bytes)
        empty = torch.empty(0, dtype=like.dtype, device=self.layout.device)
        return empty.set_(storage, 0, like.shape, like.stride())

    def fork(self, saved: list[Any]) -> list[Any]:
        """Copy the arena for a backward that may run again (retain_graph), since each run
        overwrites saved tensors."""
        lease = next(value for value in saved if isinstance(value, ArenaLease))
        fork = self.lease()
        # The family may have grown between the two.
        used = slice(self.layout.extent_bytes)
        fork.memory[used].copy_(lease.memory[used])
        slots = {id(a): b for a, b in zip(lease.slots, fork.slots, strict=False)}
        slots[id(lease)] = fork  # type: ignore[assignment]  # the lease is replaced like its slots
        return [slots.get(id(value), value) for value in saved]

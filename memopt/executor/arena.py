"""Running at planned addresses: one allocation per step, each placed tensor a view of it.

An arena is a byte tensor. A placed lifetime is a *slot*: a tensor with a storage of its own over
the arena's bytes at the planned offset, so that kernels see what an allocated tensor would show
them (some look at the whole storage). Slots own nothing: a step's lease holds the arena and dies
with the step's state, whether the backward has run, failed or never came. Steps under way at once
have arenas of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
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
    """Programs such as those of one model for several shapes, of which the next one can use the
    last step's arena.

    Attributes:
        idle: the last step's arena, kept for the next one.
        spare_bytes: by how much it may be larger than the present step's own; None: no limit.
    """

    def __init__(self) -> None:
        self.idle: list[Tensor] = []
        self.spare_bytes: int | None = 0

    def serves(self, program: Program, spare_bytes: Callable[[], int | None]) -> None:
        """Prepare for a step of a program."""
        if program.offsets is None:
            self.idle.clear()
        else:
            self.spare_bytes = spare_bytes()

    def taken(self, extent_bytes: int) -> Tensor | None:
        """Take the idle arena, if there is one; return it if it can serve as one of this size."""
        try:
            found = self.idle.pop()  # of two steps at once only one gets it: pop is atomic
        except IndexError:
            return None
        more_bytes, spare_bytes = found.numel() - extent_bytes, self.spare_bytes
        fits = more_bytes == 0 or spare_bytes is None or more_bytes <= spare_bytes
        return found if more_bytes >= 0 and fits else None


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
        if profiler_looks_on():
            self.family.idle.clear()
        self._drop_others()
        extent_bytes = self.layout.extent_bytes
        if (memory := self.family.taken(extent_bytes)) is not None:
            return memory
        return torch.empty(extent_bytes, dtype=torch.uint8, device=self.layout.device)

    def keep(self, memory: Tensor) -> None:
        """Keep the arena of a step that is over for the next one."""
        if self.layout.device.type != "cpu" or profiler_looks_on():
            return
        self._drop_others()
        Arenas._keeper = weakref.ref(self.family)
        self.family.idle[:] = [memory]

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
        # Either may be larger.
        used = slice(self.layout.extent_bytes)
        fork.memory[used].copy_(lease.memory[used])
        slots = {id(a): b for a, b in zip(lease.slots, fork.slots, strict=False)}
        slots[id(lease)] = fork  # type: ignore[assignment]  # the lease is replaced like its slots
        return [slots.get(id(value), value) for value in saved]

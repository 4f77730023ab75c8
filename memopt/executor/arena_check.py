"""The arena's debug mode: freed ranges are poisoned, and a read of overwritten or freed bytes
raises an error that names the reader and the writer.

A digest of each slot is stored when it is written and compared before every read. So a wrong
address, a tensor freed too early and a kernel that writes beyond its own tensor are found where
they do harm: at the first read of the bytes they spoilt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from memopt.errors import ArenaError
from memopt.executor.arena import ArenaLayout, ArenaLease, Arenas
from memopt.step.trial import POISON


@dataclass
class CheckedLease(ArenaLease):
    """A lease that stores digests of its slots."""

    layout: ArenaLayout
    live: dict[int, bytes] = field(default_factory=dict)
    """Slot in use → digest of its bytes."""
    spoilt: dict[int, str] = field(default_factory=dict)
    """Slot in use → what has been written over it."""

    def bytes_of(self, slot: int) -> torch.Tensor:
        """Return the arena's bytes of a slot."""
        one = self.layout.slots[slot]
        return self.memory[one.offset_bytes : one.end_bytes]

    def digest(self, slot: int) -> bytes:
        """Return a digest of a slot's bytes as they are now."""
        return hashlib.blake2b(self.bytes_of(slot).cpu().numpy().data, digest_size=16).digest()

    def wrote(self, slots: Iterable[int], what: str) -> None:
        """Store digests of the slots that `what` has just written."""
        for slot in slots:
            self._spoil(slot, f"{self.layout.name(slot)}, written by {what}")
            self.spoilt.pop(slot, None)
            self.live[slot] = self.digest(slot)

    def _spoil(self, slot: int, by: str) -> None:
        """Mark other slots in use that overlap this one as overwritten by `by`."""
        one = self.layout.slots[slot]
        for other in self.live:
            beside = self.layout.slots[other]
            shared = min(one.end_bytes, beside.end_bytes) > max(
                one.offset_bytes, beside.offset_bytes
            )
            if shared and other != slot:
                self.spoilt[other] = by

    def read(self, slots: Iterable[int], what: str) -> None:
        """Check the slots that `what` is about to read.

        Raises:
            ArenaError: a slot is free, or its bytes have changed since it was written.
        """
        for slot in slots:
            if slot not in self.live:
                raise ArenaError(
                    f"{what} reads {self.layout.name(slot)}, whose addresses have been freed"
                )
            if self.live[slot] != self.digest(slot):
                by = self.spoilt.get(slot, "a kernel that wrote beyond its own tensors")
                raise ArenaError(
                    f"{what} reads {self.layout.name(slot)}, which has been overwritten by {by}"
                )

    def freed(self, slots: Iterable[int]) -> None:
        """Poison the ranges of slots that are free now."""
        for slot in slots:
            self.live.pop(slot, None)
            self.spoilt.pop(slot, None)
            self._spoil(slot, f"the poison of {self.layout.name(slot)}, freed")
            self.bytes_of(slot).fill_(POISON)


class CheckedArenas(Arenas):
    """Arenas in debug mode, poisoned from the start."""

    def lease(self) -> ArenaLease:
        """Lease an arena for one step."""
        memory = self.memory().fill_(POISON)
        return CheckedLease(memory, self.slots_at(memory.data_ptr()), self, self.layout)

    def fork(self, saved: list[object]) -> list[object]:
        """Copy the arena as `Arenas.fork` does, digests included."""
        forked = super().fork(saved)
        for before, after in zip(saved, forked, strict=True):
            if isinstance(before, CheckedLease) and isinstance(after, CheckedLease):
                after.live, after.spoilt = dict(before.live), dict(before.spoilt)
        return forked

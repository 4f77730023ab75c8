"""Measures the memory that tensors hold by their storages, without keeping these alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.models.charges import NO_CHARGES, Charges
from memopt.torch_private.modes import is_traceable_wrapper_subclass

Memory: TypeAlias = dict[int, tuple[StorageWeakRef, int]]
"""Storages by address: a weak reference, and their bytes."""
Told: TypeAlias = Callable[[int], object]
"""Is told the address of memory that is freed."""

METERED = 4
"""Number of first steps of a kind that are metered; then the 8th, the 16th, the 32nd..."""


def is_metered(count: int) -> bool:
    """Return whether the step of this number is metered."""
    return count <= METERED or count & (count - 1) == 0


def memory_of(tensors: Iterable[Any]) -> Memory:
    """Return the memory that tensors hold: address → (its storage, bytes)."""
    storages = [
        part.untyped_storage()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        for part in _parts(tensor)
    ]
    return {one.data_ptr(): (StorageWeakRef(one), one.nbytes()) for one in storages}  # type: ignore[no-untyped-call]


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a wrapper is of: a DTensor's shard, a collective's result."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    for part in parts:
        if isinstance(part, torch.Tensor):  # else a DTensor's mesh
            yield from _parts(part)


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of memory that tensors hold; shared memory counts once."""
    return size_of(memory_of(tensors))


def size_of(memory: Memory) -> int:
    """Return the bytes of memory."""
    return sum(size for _, size in memory.values())


def gone_bytes(memory: Memory) -> dict[int, int]:
    """Return the bytes of the storages that are gone, by address."""
    return {at: size for at, (storage, size) in memory.items() if storage.expired()}  # type: ignore[no-untyped-call]


def still_held(memory: Memory) -> Memory:
    """Return the storages that are still there."""
    return {at: one for at, one in memory.items() if not one[0].expired()}  # type: ignore[no-untyped-call]


def besides(memory: Memory, other: Memory) -> int:
    """Return the bytes of memory that is not in the other."""
    return size_of({at: one for at, one in memory.items() if at not in other})


def when_freed(tensors: Iterable[torch.Tensor], told: Told) -> list[weakref.ref[torch.Tensor]]:
    """Return weak references that tell the address of a tensor's memory when it is freed."""
    return [
        weakref.ref(tensor, partial(_freed, told, address))
        for tensor in tensors
        for address in memory_of([tensor])
    ]


def _freed(
    told: Told,
    address: int,
    _tensor: weakref.ref[torch.Tensor],
    ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    # While Python exits, tensors end after their modules have gone.
    if not ending():
        told(address)


@dataclass
class Waiting:
    """Calls that await their backward.

    Attributes:
        charges: the most that waited in a step, and the inputs that they hold.
    """

    charges: Charges = NO_CHARGES
    _most: Charges = NO_CHARGES
    _inputs: Memory = field(default_factory=dict)
    _before: int = 0

    def count(self, inputs: Sequence[torch.Tensor], calls: int, halved: int) -> bool:
        """Count the calls that wait when one with these inputs begins, and those of which half a
        backward is done. That one may wait, too. Return whether one that waited was dropped since
        the last call, without a backward."""
        own, others = memory_of(inputs), still_held(self._inputs) if calls else {}
        others_bytes = besides(others, own)
        # An input may be a view of a whole data set.
        most_bytes = sum(one.nbytes for one in inputs if one.layout is torch.strided)
        own = {at: (one, min(size, most_bytes)) for at, (one, size) in own.items()}
        self._inputs = others | own
        now = Charges(kept_bytes=others_bytes, waiting_calls=calls, halved_calls=halved)
        self._most = self._most.largest(now)
        dropped, self._before = 0 < calls <= self._before, calls
        return dropped

    def begun(self, halved: int) -> None:
        """Count the calls whose backward is half done when a backward begins."""
        self._before = 0
        self._most = self._most.largest(Charges(halved_calls=halved))

    def charge(self, told: bool) -> None:
        """Charge the most waiting calls that were counted; leave out their inputs if a schedule
        tells the calls."""
        self.charges = replace(self._most, kept_bytes=0 if told else self._most.kept_bytes)

"""Hands gradients over while the backward still runs.

One autograd function returns all gradients at its end. DistributedDataParallel, which reduces a
bucket of gradients when its last one arrives, would then reduce everything after the backward.
Inside it a planned backward is a chain of autograd functions: each runs until its gradients are
complete, and autograd delivers them before the next one runs. The chain is attached to one
parameter of the first function, whose gradient passes through it.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from memopt.errors import ExecutionError
from memopt.executor.added_later import AddedLater
from memopt.executor.codegen import Parts, generate
from memopt.executor.random_state import RandomStates
from memopt.executor.recorder import Recorder
from memopt.executor.values import Halves
from memopt.step.backend import autocast_off
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.torch_private import pytree
from memopt.torch_private.modules import data_parallel_around

Handed: TypeAlias = tuple[tuple[int, Any], ...]
"""Complete gradients: (position among the joint graph's inputs, gradient)."""
Yielding: TypeAlias = Callable[..., Iterator[Handed]]
"""A backward that yields gradients as they are complete."""

_PER_BUCKET = 8
"""The most parts of the chain that a bucket's gradients come in: autograd takes a moment for
each."""


def in_parts(order: Sequence[tuple[tuple[int, ...], int]], part_bytes: int) -> list[list[int]]:
    """Split gradients, in the order in which they are complete, into parts of at least `part_bytes`
    (the last may be smaller).

    Args:
        order: (positions of the gradients that are complete at once, their bytes).
        part_bytes: at least 1.
    """
    parts: list[list[int]] = [[]]
    size_bytes = 0
    for positions, more_bytes in order:
        if size_bytes >= part_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1] += positions
        size_bytes += more_bytes
    return parts


class Handover:
    """The chain of autograd functions of one step.

    Args:
        parts: the positions whose gradients each part of the backward returns, at least two parts.
        count: how many inputs the joint graph has.
    """

    def __init__(self, parts: list[list[int]], count: int) -> None:
        self._parts, self._count = parts, count
        self._running: Iterator[Handed] | None = None
        self._done = 0

    def attached(self, values: list[Any], anchor: int) -> list[Any]:
        """Attach the chain to its anchor. Return the joint graph's inputs: those of later parts are
        detached, since autograd gets their gradients from the chain."""
        found = list(values)
        self._values = tuple(values)
        # A token on the device, so that autograd runs each part in the thread and on the stream of
        # the forward, as it runs a backward's first.
        self.zero = torch.zeros((), device=values[anchor].device)
        token = None
        for number in range(len(self._parts) - 1, 0, -1):
            later = self._parts[number]
            token = _LaterPart.apply(self, number, token, *(values[i] for i in later))  # type: ignore[no-untyped-call]
            for i in later:
                found[i] = values[i].detach()
        found[anchor] = _Anchor.apply(values[anchor], token)  # type: ignore[no-untyped-call]
        return found

    def begin(self, running: Iterator[Handed], added: AddedLater) -> tuple[Any, ...]:
        """Run the backward's first part; return gradients by position, None for later ones."""
        self._running, self._added, self._done = running, added, 0
        found = self.next_part(0)
        return tuple(found.get(i) for i in range(self._count))

    def next_part(self, number: int) -> dict[int, Any]:
        """Run a part of the backward and return its gradients by position.

        Raises:
            ExecutionError: the parts before have not run, or this one has.
        """
        if self._running is None or number != self._done:
            raise ExecutionError(
                "a part of a planned backward was asked for twice or out of turn: call backward() "
                "on the loss, once"
            )
        self._done += 1
        wanted = set(self._parts[number])
        found: dict[int, Any] = {}
        last = self._done == len(self._parts)
        try:
            with autocast_off():
                while last or not wanted <= found.keys():
                    handed = next(self._running, None)
                    if handed is None:
                        break
                    found.update(handed)
        except torch.OutOfMemoryError as error:
            found.clear()
            self._running = None
            traceback.clear_frames(error.__traceback__)  # as `Runtime._backward` does
            raise
        if last:
            self._running = None
        self._added.look(self._values, found.get)
        return found


class _Anchor(torch.autograd.Function):
    """A parameter with the chain attached to it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.token = token.detach()
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], ctx.token


class _LaterPart(torch.autograd.Function):
    """A part of the backward after the first."""

    @staticmethod
    def forward(
        ctx: Any, handover: Handover, number: int, token: torch.Tensor | None, *values: torch.Tensor
    ) -> torch.Tensor:
        ctx.handover, ctx.number, ctx.ends = handover, number, token is None
        return handover.zero.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handover: Handover = ctx.handover
        found = handover.next_part(ctx.number)
        token = None if ctx.ends else handover.zero.detach()
        own = (found.pop(i) for i in handover._parts[ctx.number])
        return (None, None, token, *own)


@dataclass(frozen=True)
class HandoverOrder:
    """The order in which a program's gradients are complete.

    Attributes:
        captured: the joint graph.
        complete: the positions of the gradients that are complete at once, in order.
        running: the program's backward; takes the arguments of `Installed.backward`.
    """

    captured: Captured
    complete: tuple[tuple[int, ...], ...]
    running: Yielding

    def handover(self) -> tuple[Handover, int] | None:
        """Return the chain for a call made now, and the position of its anchor; None: gradients
        come at the end, since nobody reduces them meanwhile or all are complete at once."""
        around = data_parallel_around()
        if around is None:
            return None
        early = {i for positions in self.complete for i in positions}
        gradients = enumerate(self.captured.gradients)
        late = tuple(i for i, one in gradients if one is not None and i not in early)
        order = [(positions, sum(map(self._bytes, positions))) for positions in self.complete]
        order += [(late, 0)] if late else []
        parts = in_parts(order, max(1, around.bucket_bytes_cap // _PER_BUCKET))
        primals = self.captured.primals
        while len(parts) > 1 and not any(primals[i].kind == "parameter" for i in parts[0]):
            parts[:2] = [parts[0] + parts[1]]
        if len(parts) < 2:
            return None
        anchor = next(i for i in parts[0] if primals[i].kind == "parameter")
        return Handover(parts, len(primals)), anchor

    def chained(self, held: list[Any], call: Call) -> tuple[Handover | None, list[Any], Call]:
        """Return the chain of a call made now, None if it needs none, and the values of parameters
        and buffers, and the call, with the chain attached."""
        made = self.handover()
        if made is None:
            return None, held, call
        chain, anchor = made
        primals, leaves, rest = self.captured.primals, call.leaves, iter(held)
        values = [next(rest) if one.held else leaves[one.index or 0] for one in primals]
        values = chain.attached(values, anchor)
        for i, primal in enumerate(primals):
            if primal.index is not None:
                leaves[primal.index] = values[i]
        held = [values[i] for i, primal in enumerate(primals) if primal.held]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return chain, held, replace(call, args=args, kwargs=kwargs)

    def _bytes(self, position: int) -> int:
        value = self.captured.primals[position].node.meta["val"]
        size_bytes: int = value.nbytes
        return size_bytes


def in_order(halves: Halves, *made_with: Any) -> HandoverOrder:
    """Return the order in which a program's gradients are complete; the arguments are those of
    `generate`."""
    complete = halves.complete_gradients
    running = _yielding(complete, halves, *made_with)
    return HandoverOrder(halves.captured, tuple(complete.values()), running)


def in_halves(halves: Halves, *made_with: Any) -> Yielding | None:
    """Return a program's backward in two halves, if it has two."""
    two = halves.first_half
    return _yielding(two, halves, *made_with) if two else None


def _yielding(
    parts: Parts,
    halves: Halves,
    swap: Any,
    random: RandomStates,
    recorder: Recorder | None,
    arenas: Any,
) -> Yielding:
    def backward() -> Yielding:
        made: Yielding
        _, made, _ = generate(halves, swap, random, recorder, arenas, in_parts=parts)
        return made

    return made_later(backward, random)


def made_later(make: Callable[[], Yielding], random: RandomStates) -> Yielding:
    """Return a backward that is made when it runs first."""
    backward = functools.cache(make)

    def running(*arguments: Any) -> Iterator[Handed]:
        handed = backward()(*arguments)
        return iter(random.settling(lambda: next(handed, None)), None)

    return running

"""A program that is ready to run in a captured model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memopt.executor.graph_segments import Segments
from memopt.executor.handover import HandoverOrder, Yielding
from memopt.executor.partial_backward import Partial, unknown
from memopt.executor.values import Origin
from memopt.step.assumed import alone, nothing_assumed


@dataclass(frozen=True)
class Installed:
    """A program ready to run in a captured model.

    Attributes:
        forward: `forward(primals) -> (outputs, saved)`.
        backward: `backward(primals, arguments, saved) -> gradients`.
        look: `look(outputs)` raises an error where a branch of the forward does not go as assumed.
        failing: makes a function, named so, fail on all ranks that run the program together.
        watched: positions of the primals whose change between forward and backward would
            give wrong gradients.
        watched_outputs: positions of the forward outputs whose change would, too.
        names: the primals' names, for messages.
        source: the generated code; "" when interpreted.
        fork: copies what the forward has saved, for a backward that may run again.
        handover: how the backward hands gradients over as they are complete; None: it cannot.
        partial: the backward where some outputs get no gradient.
        in_halves: the backward in two halves: it yields the gradients of inputs, then all others.
            None: it runs whole.
        recomputes: whether it computes anything twice.
        by_kernels: numbers of the tangents that the backward's operators read as eager's do.
        segments: where it is captured, and what runs between; None: it is not to be captured.
        origin: what the generated code was written from; None if more went into it (an arena, moved
            parameters, a recorder), or it is interpreted.
    """

    forward: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[list[Any], list[Any], list[Any]], tuple[Any, ...]]
    watched: tuple[int, ...]
    names: tuple[str, ...]
    source: str = ""
    watched_outputs: tuple[int, ...] = ()
    fork: Callable[[list[Any]], list[Any]] = list
    handover: HandoverOrder | None = None
    partial: Partial = unknown
    in_halves: Yielding | None = None
    recomputes: bool = False
    by_kernels: frozenset[int] = frozenset()
    segments: Segments | None = None
    origin: Origin | None = None
    look: Callable[[list[Any]], None] = nothing_assumed
    failing: Callable[[Callable[..., Any], str], Callable[..., Any]] = alone

"""Backwards in two halves, as the zero-bubble schedules of pipelines run them.

`torch.distributed.pipelining` asks for the gradients of a stage's inputs first, and keeps the
graph; later, from the same gradients of its outputs, for those of its parameters. Autograd computes
for each what it needs. A planned backward is one function, and would run twice. It runs once, in
the first half, which frees what the forward has saved; the parameters' gradients await the second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memopt.executor.handover import Handover
from memopt.step.captured import Primal
from memopt.torch_private.modes import keeps_graph, wanted_inputs

_PIPELINES = "torch.distributed.pipelining"


@dataclass
class FirstHalf:
    """The first half of a call's backward.

    Attributes:
        primals: the joint graph's inputs.
        tangents: the gradients of its outputs, as autograd gave them.
        kept: the parameters' gradients by position, once it has run.
    """

    primals: Sequence[Primal]
    tangents: list[Any]
    kept: tuple[Any, ...] | None = None

    @staticmethod
    def running(
        primals: Sequence[Primal], tangents: list[Any], handover: Handover | None
    ) -> FirstHalf | None:
        """Return the first half that runs now: a backward that keeps its graph, and is asked for no
        parameter's gradient, where there may be pipelines. None: the backward is another one, or
        hands its gradients over in parts."""
        if handover or not keeps_graph() or _PIPELINES not in sys.modules:
            return None
        wanted = wanted_inputs()
        if not wanted or any(primals[i].held for i in wanted):
            return None
        return FirstHalf(primals, tangents)

    def keep(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep the gradients of parameters; return the others, by position."""
        held = [primal.held for primal in self.primals]
        self.kept = tuple(one if own else None for own, one in zip(held, gradients, strict=True))
        return tuple(None if own else one for own, one in zip(held, gradients, strict=True))

    def second(self, tangents: list[Any]) -> tuple[Any, ...] | None:
        """Return the gradients that were kept; None: the backward that runs now is no second half,
        since it asks for other gradients, or begins with others."""
        if not all(self.primals[i].held for i in wanted_inputs()):
            return None
        pairs = zip(self.tangents, tangents, strict=True)
        return self.kept if all(_is_equal(*pair) for pair in pairs) else None


def _is_equal(before: Any, now: Any) -> bool:
    if before is now or before is None or now is None:
        return before is now
    return before.shape == now.shape and torch.equal(before, now)

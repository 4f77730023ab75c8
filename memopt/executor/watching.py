"""Whether what a trace read, beside its inputs, is still what it was."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from memopt.errors import CaptureError, GuardError
from memopt.profiler.capture import Captured, traced_again
from memopt.profiler.watch import Watch, same
from memopt.profiler.watches import Watches

_LOG = logging.getLogger(__name__)

REMEDY = "plan again for this call (memopt.plan), or call the original module"


class Watching:
    """Looks at everything that one captured model's trace read.

    Args:
        captured: the captured model.
        watches: what its trace read.
        structure: what else must be as planned: modules, parameters and buffers.
    """

    def __init__(self, captured: Captured, watches: Watches, structure: Sequence[Watch]) -> None:
        self._captured, self._watches, self._structure = captured, watches, structure
        self._everything = watches.with_others(structure)
        self._refused: tuple[Watch, Any] | None = None

    def unchanged(self, model: nn.Module) -> bool:
        """Whether nothing has changed, the structure included."""
        return self._everything.unchanged(model)

    def check(self, model: nn.Module) -> None:
        """Raise GuardError, naming what changed and both values, unless all is as planned.

        Dynamo asks for more than a graph needs where a global is concerned: a registry that has
        grown fails its guards. Where only such things changed, the model is traced again, and what
        gives the same graph is right.
        """
        changed = self._watches.changed(model)
        if changed is None:
            return
        watch, found = changed
        difference = watch.difference(found)
        refused = self._refused
        if watch.shared and not (refused and refused[0] is watch and same(found, refused[1])):
            _LOG.info("tracing again: %s", difference)
            watches = self._traced_again(model)
            if watches is not None:
                self._watches = watches
                self._everything = watches.with_others(self._structure)
                return
            # A trace takes seconds: not for every call.
            self._refused = (watch, found)
        raise GuardError(f"{difference}; {REMEDY}")

    def _traced_again(self, model: nn.Module) -> Watches | None:
        try:
            return traced_again(self._captured, model)
        except (CaptureError, RuntimeError):
            return None

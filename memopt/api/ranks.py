"""One plan for all ranks: they check that their requests are alike, and the first one plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from memopt.api.request import PlanRequest
from memopt.errors import MemoptError
from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.plan_record import PlanRecord
from memopt.stages.stages import PROFILING

if TYPE_CHECKING:
    from memopt.step.captured import Captured
    from memopt.step.profiled import Profiled
    from memopt.step.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")

PLANNING = "rank 0 plans"


def planning_ranks(model: Any, mode: str) -> Ranks | None:
    """Return the processes that plan a model together; None: this one plans alone."""
    if mode == "estimate" or isinstance(model, (Chain, Graph)):
        return None
    from torch import nn

    from memopt.step.ranks import ranks_of

    return ranks_of(model) if isinstance(model, nn.Module) else None


def telling_ranks(doing: str, place: int = 0) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that ranks call together: an error that one of them meets alone, such as
    a budget that cannot be read, ends the call on all ranks that run the model.

    Args:
        doing: what the function does, for messages.
        place: of the model in the function's arguments.
    """

    def decorated(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def told(*args: P.args, **kwargs: P.kwargs) -> T:
            model = args[place] if len(args) > place else kwargs.get("model")
            torch = sys.modules.get("torch")
            alone = kwargs.get("mode") == "estimate"
            if torch is None or alone or not isinstance(model, torch.nn.Module):
                return call(*args, **kwargs)
            from memopt.step.ranks import telling_ranks as telling

            with telling(model, doing):
                return call(*args, **kwargs)

        return told

    return decorated


@contextmanager
def noting_ranks(doing: str) -> Iterator[None]:
    """Leave a note of an error inside for ranks that wait in vain for this one, which does not
    know here which these are.

    Args:
        doing: the present activity, for messages.
    """
    try:
        yield
    except MemoptError as error:
        if "torch" in sys.modules:
            from memopt.step.ranks import note_failure

            note_failure(doing, error)
        raise


def find_ranks(model: Any, inputs: Any, mode: str) -> Captured | None:
    """Find, once and before any of it runs, the ranks that a model communicates with in its own
    forward and backward.

    Returns:
        The capture that was searched: while it is held, planning need not capture the model again.
    """
    from torch import nn

    from memopt.step.ranks import is_searched, note_members, several_are_there, sharers_of

    if mode == "estimate" or not isinstance(model, nn.Module) or not several_are_there():
        return None
    if inputs is None or is_searched(model) or sharers_of(model):
        return None
    from memopt.capture.captures import reused_capture
    from memopt.capture.training_call import training_call
    from memopt.models.record import OutputGradients
    from memopt.step.collectives import members_in

    try:
        captured = reused_capture(model, training_call(model, inputs), OutputGradients)
    except (MemoptError, ValueError, TypeError, RuntimeError):
        return None  # planning meets it, too, and says more
    note_members(model, members_in(captured.module))
    return captured


@contextmanager
def profiling_together(
    ranks: Ranks | None, model: Any, inputs: Any, wanted: PlanRequest
) -> Iterator[None]:
    """Enter a context in which all ranks profile the same step at the same pace.

    Args:
        ranks: the processes; None: this one alone.
        model, inputs: of this rank.
        wanted: the request; its options must be the same on all ranks.

    Raises:
        RankError: the ranks' requests differ, or one of them fails.
    """
    if ranks is None:
        yield
        return
    from memopt.step.ranks import together

    with ranks.failing_together(PROFILING):
        ranks.check_same(_facts(model, inputs, wanted), PROFILING)
        with together(ranks):
            yield


def _facts(model: Any, inputs: Any, wanted: PlanRequest) -> dict[str, str]:
    """List the facts that must be the same on all ranks, as text for messages."""
    import torch

    from memopt.capture.training_call import training_call
    from memopt.step.described import described, described_text

    shapes = [(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
    leaves = training_call(model, inputs).leaves
    asked = wanted.options
    arguments = [f"{name}={value!r}" for name, value in asked.items() if name not in _NOT_ASKED]
    return {
        "torch version": str(torch.__version__),
        "memopt version": str(sys.modules["memopt"].__version__),
        "model": f"{type(model).__name__} {shapes}",
        "inputs": "; ".join(described_text(described(leaf)) for leaf in leaves),
        "budget": repr(asked["budget"]),
        "arguments": ", ".join(arguments),
    }


_NOT_ASKED = {"budget", "loss_fn", "targets", "optimizer", "cache"}
"""Options left out of the compared arguments: the budget is a fact of its own, `cache` may differ,
and the others are objects without a text that could be compared."""


def planned_by_first(
    ranks: Ranks | None, profiled: Profiled | None, solve: Callable[[], PlanRecord]
) -> PlanRecord:
    """Plan on the first rank, and return its plan on all ranks.

    Raises:
        RankError: a rank is gone. An error that `solve` raises is raised on every rank.
    """
    if ranks is None or profiled is None:
        return solve()
    made = ranks.from_first(lambda: replace(solve(), profiled=None, record=None), PLANNING)
    return replace(made, profiled=profiled, record=profiled.record)

"""Every exception memopt raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator


class MemoptError(Exception):
    """Base class of memopt's own errors."""


class InfeasibleBudgetError(MemoptError):
    """The strategy has no plan within the budget.

    Attributes:
        budget_bytes: the budget asked for, total bytes.
        smallest_budget_bytes: the smallest budget known to be feasible for the same
            strategy, total bytes; None if none is known.
        proved: whether there is none; otherwise the search found none in its time.
    """

    def __init__(
        self,
        message: str,
        budget_bytes: int,
        smallest_budget_bytes: int | None = None,
        proved: bool = True,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_budget_bytes = smallest_budget_bytes
        self.proved = proved

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all arguments, so that another process can raise the error."""
        return type(self), (
            *self.args,
            self.budget_bytes,
            self.smallest_budget_bytes,
            self.proved,
        )


class TableTooLargeError(MemoptError, MemoryError):
    """A dynamic program's tables would need more memory than they may; they were not made."""


class CaptureError(MemoptError):
    """The model cannot be captured as one graph; the message names the place and the remedy.

    Attributes:
        modules: the names of the sub-modules in whose code the capture failed, the outermost first,
            as far as is known.
    """

    modules: tuple[str, ...] = ()


class InputsError(MemoptError, ValueError):
    """The model fails on these inputs without memopt, too; the message quotes its own error."""


class NothingToTrainError(CaptureError):
    """No parameter and no input requires a gradient, or no output has one."""


class ProfileError(MemoptError):
    """An operator could not be measured."""


class ProfilerBusyError(ProfileError):
    """torch's profiler runs already, and memory on a CPU would be measured with another profile."""

    def __init__(
        self,
        message: str = "torch's profiler runs, and memopt measures memory on a CPU with a profile "
        "of its own, which would end that one: plan first (a wrapped model does in its first "
        "step), or profile later steps",
    ) -> None:
        super().__init__(message)


class GuardError(MemoptError):
    """A planned module was called in a way that its plan was not made for."""


class ExecutionError(MemoptError):
    """A planned step cannot go on (saved state gone, parameter changed, double backward...)."""


class NotYetPlannedError(MemoptError, AttributeError):
    """A plan made without inputs was asked for figures before its first training step."""


class RankError(MemoptError):
    """Ranks that plan or run one step together differ, or one of them failed."""


class NotReturnedError(ExecutionError, AttributeError):
    """An output was used that a step planned with `returns="loss"` does not return."""


class ArenaError(ExecutionError):
    """In the arena's debug mode, a kernel read addresses that do not hold its operand."""


class PlanFileError(MemoptError):
    """A plan file is unreadable, of another version, or belongs to another model."""


class InvalidProgramError(MemoptError):
    """A strategy produced a program that the validator rejects (a bug in the strategy)."""


def led_to(error: BaseException | None, before: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it came from.

    Args:
        error: raised.
        before: what `sys.exception()` returned before the code that raised it: a caller's earlier
            error, which is no cause of this one. It is left out with all that led to it.
    """
    seen: set[int] = set()  # an error may be a cause of its own cause
    while error is not None and error is not before and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

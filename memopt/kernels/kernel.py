"""memopt's own kernels: named functions that a plan runs in place of ATen operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PARTS = 8
"""Default number of parts of a batch."""


@dataclass(frozen=True)
class Kernel:
    """A callable with a name, as generated code and the profiler's cache know it.

    Attributes:
        name: "family.variant", unique; change it when the function changes, so that measured
            costs are not reused.
        function: takes and returns what the operator does, without writing to its arguments.
        over: the same, bit for bit, but its first result overwrites its first argument;
            None: there is no such kernel.
    """

    name: str
    function: Callable[..., Any]
    over: Kernel | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel."""
        return self.function(*args, **kwargs)

    def __str__(self) -> str:
        return f"memopt.{self.name}"

    @property
    def __name__(self) -> str:
        return self.name.replace(".", "_")


def with_twin(name: str, function: Callable[..., Any], over: Callable[..., Any]) -> Kernel:
    """Make a kernel with its twin that does the same over its first argument (`Kernel.over`)."""
    return Kernel(name, function, Kernel(f"{name}.over", over))


def overwriting(name: str, over: Callable[..., Any]) -> Kernel:
    """Make a kernel that overwrites a copy of its first argument, with its twin `over`."""
    return with_twin(name, lambda first, *rest: over(first.clone(), *rest), over)


def writing(name: str, write: Callable[..., Any], like: int = 0) -> Kernel:
    """Make a kernel that writes to a new tensor, with its twin that writes to its first argument.

    Args:
        name: the kernel's.
        write: `write(result, *args)`.
        like: position of the argument whose layout the new tensor gets.
    """
    return with_twin(
        name,
        lambda *args: write(torch.empty_like(args[like]), *args),
        lambda *args: write(args[0], *args),
    )


def split(length: int, parts: int = PARTS) -> list[slice]:
    """Return at most so many slices of a batch or of rows, of equal length but for the last.
    Kernels process them one by one, to bound their scratch memory."""
    step = max(1, -(-length // parts))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]

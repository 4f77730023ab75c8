"""A kernel of memopt's own: a named function that a plan runs in place of an ATen operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PARTS = 8
"""Of a batch, where nothing else is asked for."""


@dataclass(frozen=True)
class Kernel:
    """A callable with a name, as generated code and the profiler's cache know it.

    Attributes:
        name: "family.variant", unique; change it when the function changes, so that measured
            costs are not reused.
        function: takes and returns what the operator does, without writing to its arguments.
        over: the same, bit for bit, but that its first result is its first argument, overwritten;
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
    """A kernel, and the function that does the same over its first argument (`Kernel.over`)."""
    return Kernel(name, function, Kernel(f"{name}.over", over))


def overwriting(name: str, over: Callable[..., Any]) -> Kernel:
    """A kernel that copies its first argument and overwrites the copy, and its twin `over`."""
    return with_twin(name, lambda first, *rest: over(first.clone(), *rest), over)


def writing(name: str, write: Callable[..., Any], like: int = 0) -> Kernel:
    """A kernel that writes to a new tensor, and its twin that writes to its first argument.

    Args:
        name: the kernel's.
        write: `write(result, *args)`.
        like: the position of the argument as which the new tensor is laid out.
    """
    return with_twin(
        name,
        lambda *args: write(torch.empty_like(args[like]), *args),
        lambda *args: write(args[0], *args),
    )


def split(length: int, parts: int = PARTS) -> list[slice]:
    """At most so many slices of a batch or of rows, alike but for the last: kernels go through
    them one by one, to bound their scratch memory."""
    step = max(1, -(-length // parts))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]

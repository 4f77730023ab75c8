"""A region of operators, compiled or run in chunks, as the kernel of one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph as FxGraph

PREFIX = "memopt.fused."
"""Prefix of the targets of compiled operators; the key of the region follows."""


@dataclass(eq=False)
class FusedKernel:
    """Kernel of a compiled operator: `kernel(*inputs) -> results`.

    Attributes:
        key: equal regions have equal keys, in every process and on every machine.
        run: takes the list of its inputs, and empties it; None: not compiled.
        graph: its computation in ATen operators; the placeholders are its inputs.
        workspace_bytes: for estimates: its scratch memory beside inputs and results.
    """

    key: str
    run: Callable[[list[Any]], Any] | None = None
    graph: FxGraph | None = None
    workspace_bytes: int = 0

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel; the results are new tensors that share no memory with one another."""
        assert self.run is not None
        return self.run(list(inputs))

    def __str__(self) -> str:
        return f"{PREFIX}{self.key}"

    @property
    def __name__(self) -> str:
        return f"fused_{self.key}"

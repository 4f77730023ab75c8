"""Another form of a compiled region, or of what reads its results: an alternative to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from memopt.profiler.compiled.region_graph import Subgraph
from memopt.profiler.flops import Work


class _Here:
    """Stands for what a view looks into."""

    def __repr__(self) -> str:
        return "HERE"


HERE = _Here()


@dataclass(frozen=True)
class ViewCall:
    """A view: its arguments have HERE where it looks into something.

    Attributes:
        target, args, kwargs: of the call.
        value: what it gives (fake).
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any


@dataclass(frozen=True)
class Operand:
    """What a form reads: a node that names a tensor, and the views of it, one after the other.

    Attributes:
        base: a node of the step with kernels; or one that was replaced, of a value that only forms
            write.
        views: from the base on; (): the base itself.
    """

    base: Node
    views: tuple[ViewCall, ...] = ()


@dataclass(frozen=True, eq=False)
class Form:
    """Another way to run a call of the step, which reads or writes other tensors.

    Attributes:
        call: of the step with kernels.
        name: unique among the call's forms.
        target: what runs: a kernel that is compiled when it is needed, or the call's own.
        args: its arguments, Operands among them.
        results: bases, as an Operand's, of what it returns; None: what the call does.
        part: what its kernel computes; None: it runs the call's own.
        work: of its kernel, for an estimate.
    """

    call: Node
    name: str
    target: Any
    args: Sequence[Any]
    results: tuple[Node, ...] | None = None
    part: Subgraph | None = None
    work: tuple[Work, ...] = ()

"""What a trace meets of tensors' values, and what it is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import GraphModule, Node

from memopt.torch_private.instructions import Place


@dataclass(frozen=True)
class KnownValue:
    """What a trace is told of a value that it met.

    Attributes:
        value: the truth of a branch, or a number.
        compute: computes it from the call's flat arguments; None: it depends on more.
    """

    value: Any
    compute: GraphModule | None = None


class KnownValues(Protocol):
    """Tells a trace of values; None: nothing is known, so that Dynamo refuses the branch, or makes
    a symbol of the number."""

    def truth(self, node: Node, place: Place) -> KnownValue | None:
        """Return the truth of the value of a node in Dynamo's graph, a tensor or a number."""

    def number(
        self, node: Node, place: Place, nested: bool, state: Mapping[str, Any] | None = None
    ) -> KnownValue | None:
        """Return the number in a tensor, or for `nested` all in nested lists, or a size that may
        depend on parameters and buffers: `state` has these, by their targets."""

    def begin(self) -> None:
        """Answer from the first question on: a trace begins."""


@dataclass(frozen=True)
class Met:
    """A value that a trace has met in a branch or a check, or of which it has a number.

    Attributes:
        variables: Dynamo's variables of the tensors that decide, as they were there (the forward
            may change them later); none if the call's arguments do.
        node: its node in Dynamo's graph, where the value is looked at.
        goes: how the branch goes, or the number.
        raises: whether the forward raises an error where it goes the other way.
        decide: computes the truth from the tensors' numbers; None: it is the one tensor's.
        compute: see `KnownValue.compute`.
        truth: whether a branch asks for it.
        place: where a number is read.
        number: what the forward reads, if that is no truth.
    """

    variables: tuple[Any, ...]
    node: Node
    goes: Any
    raises: bool = False
    decide: GraphModule | None = None
    compute: GraphModule | None = None
    truth: bool = True
    place: Place | None = None
    number: Any = None

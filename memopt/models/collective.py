"""Collectives: operators in which all ranks of a group take part, over the network."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from memopt.models.checks import check_bytes
from memopt.models.codec import Check


class CollectiveKind(StrEnum):
    """The operation of a collective on the tensors of its ranks."""

    ALL_GATHER = "all gather"
    REDUCE_SCATTER = "reduce scatter"
    ALL_REDUCE = "all reduce"
    ALL_TO_ALL = "all to all"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer of an operator over the network, between ranks.

    Attributes:
        kind: the operation.
        ranks: how many take part.
        size_bytes: of the whole: the gathered tensor, the tensor before it is scattered, and
            otherwise the tensor of one rank; all tensors together if it is coalesced.
        stride: distance between the group's ranks in the numbering of all ranks: 1 for
            neighbours, 8 if each is the first of its node of 8.
    """

    kind: CollectiveKind
    ranks: Annotated[int, Check("at least 1 rank", lambda value: value >= 1)]
    size_bytes: int
    stride: Annotated[int, Check("at least 1", lambda value: value >= 1)] = 1

    def __post_init__(self) -> None:
        check_bytes(f"Collective {self.kind}", size_bytes=self.size_bytes)
        if self.ranks < 1 or self.stride < 1:
            raise ValueError(
                f"Collective {self.kind}: ranks and stride must be at least 1, "
                f"got {self.ranks} and {self.stride}"
            )

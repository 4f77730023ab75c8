"""A graph seen as a chain: the chain that strategies plan, and the lowering of its schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.models.steps import ChainStep
from memopt.programs.instructions import Program


@dataclass(frozen=True)
class ChainView(ABC):
    """A graph and its chain.

    Class attributes:
        exact: whether a schedule and its program need the same memory and time. If not, the
            program needs at most the schedule's memory."""

    graph: Graph
    chain: Chain

    exact: ClassVar[bool] = False

    @abstractmethod
    def lower(self, steps: Sequence[ChainStep], budget_bytes: int | None = None) -> Program:
        """Lower a chain schedule to a program.

        Args:
            steps: a schedule of `chain`.
            budget_bytes: device memory in all, for views that choose between two programs.

        Raises:
            InvalidProgramError: the schedule cannot be lowered.
        """

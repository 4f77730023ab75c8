"""Replay of chain steps: the memory and time of a chain schedule (Rotor §3, Table 1).

Values are a^ℓ, ā^ℓ (contains a^ℓ) and δ^ℓ, each counted on its own. At a step, memory is
resident + live values + the step's outputs + its overhead (Rotor Definition 3.3). δ^n, the
gradient of the loss, is charged from the start, as the dynamic programs charge it. Parameter
gradients g_ℓ are counted from B^ℓ on (docs/strategies/rotor.md, "Deviations").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain
from memopt.models.steps import FORWARD_MOVES, ChainStep, Move


@dataclass(frozen=True, slots=True)
class ChainTimeline:
    """The memory and time of a replayed chain schedule.

    Attributes:
        peak_bytes: the largest memory over all steps, resident included.
        time_s: the sum of the steps' times.
        step_bytes: memory during each step, resident, outputs and overheads included.
        live_bytes: memory after each step.
    """

    peak_bytes: int
    time_s: float
    step_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]


class ChainState:
    """The values held while a chain schedule runs; `apply` advances by one step."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.activations: set[int] = {0}
        self.saved: set[int] = set()
        self.gradient = len(chain)
        self.live_bytes = (
            chain.resident_bytes + chain.input_bytes + chain.gradient_bytes(len(chain))
        )

    def apply(self, step: ChainStep) -> tuple[int, float]:
        """Run one step; return (memory during it in bytes, its time in seconds).

        Raises InvalidProgramError when the step's inputs are absent, or its output is present.
        """
        if not 1 <= step.stage <= len(self.chain):
            raise InvalidProgramError(f"{step}: the chain has stages 1 to {len(self.chain)}")
        if step.move in FORWARD_MOVES:
            return self._forward(step)
        if step.move is Move.BACKWARD:
            return self._backward(step)
        if step.move is Move.DROP_ACTIVATION:
            self._drop_activation(step)
        elif step.move is Move.DROP_SAVED:
            self._drop(self.saved, step, self.chain.stages[step.stage - 1].saved_bytes)
        else:
            raise InvalidProgramError(f"{step}: transfers are not part of a Rotor schedule")
        return self.live_bytes, 0.0

    def _drop_activation(self, step: ChainStep) -> None:
        self._drop(self.activations, step, self.chain.activation_bytes(step.stage))

    def _drop(self, held: set[int], step: ChainStep, size_bytes: int) -> None:
        if step.stage not in held:
            raise InvalidProgramError(f"{step}: the value is not in memory")
        held.remove(step.stage)
        self.live_bytes -= size_bytes

    def _need_input(self, step: ChainStep) -> None:
        if step.stage - 1 not in self.activations and step.stage - 1 not in self.saved:
            raise InvalidProgramError(f"{step}: a^{step.stage - 1} is not in memory")

    def _forward(self, step: ChainStep) -> tuple[int, float]:
        self._need_input(step)
        index, stage = step.stage, self.chain.stages[step.stage - 1]
        saving = step.move is Move.FORWARD_ALL
        held = self.saved if saving else self.activations
        if index in held:
            raise InvalidProgramError(f"{step}: its output is already in memory")
        dropping = step.move is Move.FORWARD_NO_SAVE
        if dropping and (index == 1 or index - 1 not in self.activations):
            raise InvalidProgramError(f"{step}: there is no a^{index - 1} of its own to drop")
        held.add(index)
        self.live_bytes += stage.saved_bytes if saving else stage.output_bytes
        overhead = stage.forward_overhead_bytes if saving else stage.no_save_overhead_bytes
        during = self.live_bytes + overhead
        if dropping:
            self._drop_activation(ChainStep(Move.DROP_ACTIVATION, index - 1))
        return during, stage.forward_time_s

    def _backward(self, step: ChainStep) -> tuple[int, float]:
        self._need_input(step)
        index, stage = step.stage, self.chain.stages[step.stage - 1]
        if self.gradient != index:
            raise InvalidProgramError(f"{step}: δ^{index} is not in memory")
        if index not in self.saved:
            raise InvalidProgramError(f"{step}: ā^{index} is not in memory")
        self.live_bytes += self.chain.gradient_bytes(index - 1) + stage.parameter_gradient_bytes
        during = self.live_bytes + stage.backward_overhead_bytes
        self.live_bytes -= self.chain.gradient_bytes(index) + stage.saved_bytes
        self.saved.remove(index)
        self.gradient = index - 1
        if index > 1 and index - 1 in self.activations:
            self._drop_activation(ChainStep(Move.DROP_ACTIVATION, index - 1))
        return during, stage.backward_time_s


def replay_chain(chain: Chain, steps: Iterable[ChainStep]) -> ChainTimeline:
    """Replay a whole schedule from a^0 and δ^n to δ^0.

    Raises:
        InvalidProgramError: the first step whose inputs are absent, or a schedule that does
            not end with B^1.
    """
    state = ChainState(chain)
    step_bytes: list[int] = []
    live_bytes: list[int] = []
    time_s = 0.0
    for step in steps:
        during, seconds = state.apply(step)
        step_bytes.append(during)
        live_bytes.append(state.live_bytes)
        time_s += seconds
    if state.gradient != 0:
        raise InvalidProgramError(f"the schedule ends before B^1: δ^{state.gradient} is left")
    return ChainTimeline(max(step_bytes), time_s, tuple(step_bytes), tuple(live_bytes))

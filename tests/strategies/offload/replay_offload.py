"""Replay of chain schedules with transfers, under the semantics of programs.

The rules of `memopt.programs.replay`, for chain steps: memory is resident + live values + the
step's outputs and overhead; the compute stream takes the steps in order; a transfer starts when its
step is reached, its data exist and its link is free. RELEASE waits for the copy to the host,
then frees the device copy; a PREFETCH occupies memory from its step on and its first reader
waits. Where the papers' chain replay charges δ^n from the start, here it arrives with B^n.
"""

from __future__ import annotations

from collections.abc import Iterable

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.steps import TRANSFER_MOVES, ChainStep, Move
from memopt.programs.replay import Direction, Timeline, Transfer


def replay_offload(
    chain: Chain, steps: Iterable[ChainStep], device: Device | None = None
) -> Timeline:
    """Replay a whole schedule, with or without transfers, from a^0 to δ^0.

    Args:
        chain: n stages, the loss last.
        steps: the schedule.
        device: link rates; None: transfers take no time.

    Returns:
        One row per step; a transfer's `tensor` is its stage (0: the chain's input).

    Raises:
        InvalidProgramError: the first step that cannot be done, or a schedule that does not
            end with B^1.
    """
    state = _State(chain, device or Device())
    for position, step in enumerate(steps):
        try:
            state.run(position, step)
        except _Invalid as error:
            raise InvalidProgramError(f"step {position}, {step}: {error}") from None
    if state.gradient != 0:
        raise InvalidProgramError(f"the schedule ends before B^1: δ^{state.gradient} is left")
    return state.timeline()


class _Invalid(Exception):
    """Why a step cannot be done."""


class _State:
    """Device, host and streams while a schedule is replayed. Stage ℓ's x_ℓ is ā^ℓ, or a^0."""

    def __init__(self, chain: Chain, device: Device) -> None:
        self.chain = chain
        self.device = device
        self.activations: set[int] = set()
        self.saved: set[int] = {0}
        self.gradient = len(chain)
        self.device_bytes = chain.resident_bytes + chain.input_bytes
        self.host_bytes = 0
        self.during_bytes = self.device_bytes
        self.now_s = self.wait_s = 0.0
        self.out_free_s = self.in_free_s = 0.0
        self.stored_s: dict[int, float] = {}
        """Stage → when its host copy is complete; the stages that have one."""
        self.arrival_s: dict[int, float] = {}
        """Stage → when its copy back is complete, until a reader has passed it."""
        self.returned: set[int] = set()
        """Stages with a copy back on the device or on its way, and still one on the host."""
        self.transfers: list[Transfer] = []
        self.rows: list[tuple[int, int, int, float, float, float]] = []

    def run(self, position: int, step: ChainStep) -> None:
        """Do one step and record its row."""
        first = 0 if step.move in TRANSFER_MOVES else 1
        if not first <= step.stage <= len(self.chain):
            raise _Invalid(f"the chain has stages {first} to {len(self.chain)}")
        self.wait_s = 0.0
        self.during_bytes = self.device_bytes
        before_s = self.now_s
        match step.move:
            case Move.OFFLOAD:
                self._offload(position, step.stage)
            case Move.RELEASE:
                self._release(step.stage)
            case Move.PREFETCH:
                self._prefetch(position, step.stage)
            case Move.BACKWARD:
                self._backward(step.stage)
            case Move.DROP_ACTIVATION:
                self._drop_activation(step.stage)
            case Move.DROP_SAVED:
                self._drop_saved(step.stage)
            case _:
                self._forward(step.stage, step.move)
        self.rows.append(
            (
                self.during_bytes,
                self.device_bytes,
                self.host_bytes,
                before_s + self.wait_s,
                self.now_s,
                self.wait_s,
            )
        )

    def timeline(self) -> Timeline:
        """The rows, as columns."""
        step_bytes, live_bytes, host_bytes, start_s, end_s, stall_s = zip(*self.rows, strict=True)
        peak = max(step_bytes)
        return Timeline(
            peak_bytes=peak,
            peak_instruction=step_bytes.index(peak),
            host_peak_bytes=max(host_bytes),
            time_s=max([self.now_s, *(transfer.end_s for transfer in self.transfers)]),
            step_bytes=step_bytes,
            live_bytes=live_bytes,
            host_bytes=host_bytes,
            start_s=start_s,
            end_s=end_s,
            stall_s=stall_s,
            transfers=tuple(self.transfers),
        )

    def _size(self, stage: int) -> int:
        return self.chain.stages[stage - 1].saved_bytes if stage else self.chain.input_bytes

    def _wait(self, until_s: float) -> None:
        if until_s > self.now_s:
            self.wait_s += until_s - self.now_s
            self.now_s = until_s

    def _read(self, stage: int, *, saved: bool) -> None:
        """Read a^stage, or ā^stage if `saved`; a copy under way is waited for."""
        if stage in self.saved:
            self._wait(self.arrival_s.pop(stage, 0.0))
        elif saved or stage not in self.activations:
            where = "on the host" if stage in self.stored_s else "absent"
            raise _Invalid(f"{'ā' if saved else 'a'}^{stage} is {where}")

    def _drop_host(self, stage: int) -> None:
        """A reader has passed: if x_stage came back, its host copy goes."""
        if stage in self.returned:
            self.returned.remove(stage)
            del self.stored_s[stage]
            self.host_bytes -= self._size(stage)

    def _forward(self, stage: int, move: Move) -> None:
        self._read(stage - 1, saved=False)
        costs = self.chain.stages[stage - 1]
        saving = move is Move.FORWARD_ALL
        held = self.saved if saving else self.activations
        if stage in held or (saving and stage in self.stored_s):
            raise _Invalid("its output is there already")
        held.add(stage)
        self.device_bytes += costs.saved_bytes if saving else costs.output_bytes
        overhead = costs.forward_overhead_bytes if saving else costs.no_save_overhead_bytes
        self.during_bytes = self.device_bytes + overhead
        self.now_s += costs.forward_time_s
        self._drop_host(stage - 1)
        if move is Move.FORWARD_NO_SAVE:
            self._drop_activation(stage - 1)
            self.during_bytes = max(self.during_bytes, self.device_bytes)

    def _backward(self, stage: int) -> None:
        if self.gradient != stage:
            raise _Invalid(f"δ^{stage} is not there")
        self._read(stage - 1, saved=False)
        self._read(stage, saved=True)
        costs = self.chain.stages[stage - 1]
        if stage == len(self.chain):
            self.device_bytes += costs.gradient_bytes
        self.device_bytes += self.chain.gradient_bytes(stage - 1) + costs.parameter_gradient_bytes
        self.during_bytes = self.device_bytes + costs.backward_overhead_bytes
        self.now_s += costs.backward_time_s
        self.device_bytes -= costs.gradient_bytes
        self.gradient = stage - 1
        self._drop_host(stage)
        self._drop_host(stage - 1)
        self._drop_saved(stage)
        if stage > 1 and stage - 1 in self.activations:
            self._drop_activation(stage - 1)

    def _drop_activation(self, stage: int) -> None:
        if stage not in self.activations:
            raise _Invalid(f"there is no a^{stage} of its own to drop")
        self.activations.remove(stage)
        self.device_bytes -= self.chain.activation_bytes(stage)

    def _drop_saved(self, stage: int) -> None:
        if stage not in self.saved:
            raise _Invalid(f"ā^{stage} is not there")
        if stage in self.stored_s:
            raise _Invalid(f"the host copy of stage {stage} was never brought back")
        self.saved.remove(stage)
        self.arrival_s.pop(stage, None)
        self.device_bytes -= self._size(stage)

    def _offload(self, position: int, stage: int) -> None:
        if stage not in self.saved:
            raise _Invalid(f"stage {stage} is not on the device")
        if stage in self.stored_s:
            raise _Invalid(f"stage {stage} is on the host already")
        start_s = max(self.now_s, self.arrival_s.get(stage, 0.0), self.out_free_s)
        end_s = start_s + self.device.swap_out_time_s(self._size(stage))
        self.out_free_s = end_s
        if not self.device.duplex:
            self.in_free_s = end_s
        self.stored_s[stage] = end_s
        self.host_bytes += self._size(stage)
        self.transfers.append(Transfer(position, stage, Direction.TO_HOST, start_s, end_s))

    def _release(self, stage: int) -> None:
        if stage not in self.saved or stage not in self.stored_s or stage in self.returned:
            raise _Invalid(f"stage {stage} is not both on the device and offloaded")
        self._wait(self.stored_s[stage])
        self.saved.remove(stage)
        self.device_bytes -= self._size(stage)

    def _prefetch(self, position: int, stage: int) -> None:
        if stage not in self.stored_s:
            raise _Invalid(f"stage {stage} is not on the host")
        if stage in self.saved:
            raise _Invalid(f"stage {stage} is on the device already")
        self.saved.add(stage)
        self.device_bytes += self._size(stage)
        self.during_bytes = self.device_bytes
        start_s = max(self.now_s, self.stored_s[stage], self.in_free_s)
        end_s = start_s + self.device.swap_in_time_s(self._size(stage))
        self.in_free_s = end_s
        if not self.device.duplex:
            self.out_free_s = end_s
        self.arrival_s[stage] = end_s
        self.returned.add(stage)
        self.transfers.append(Transfer(position, stage, Direction.FROM_HOST, start_s, end_s))

"""The part of the validator that checks tensors which begin and end on the host.

It shares no code with the replay, nor with `memopt.programs.moved`: a movable tensor's own history
is followed from the first instruction to the last. Its host copy always exists. An update on the
device makes it stale, and a SwapOut of the device copy brings it up to date. An update on the host
changes the host copy itself, while there is no device copy. In a repeated step, a tensor whose
first transfer is to the host must begin the step on the device, with a stale host copy, and end it
so.
"""

from __future__ import annotations

from memopt.models.graph import Graph, Operator, Phase, TensorKind
from memopt.programs.instructions import Compute, DropHost, Free, SwapIn, SwapOut
from memopt.programs.validate_placement import LiveRange
from memopt.programs.violations import Violation, ViolationCode

Code = ViolationCode

HOST_CHANGE, HOST_READ = "host change", "host read"
"""Events of an update on the host: on its parameter and state, and on its gradient."""


OWN = {Free.__name__, SwapIn.__name__, SwapOut.__name__, DropHost.__name__, HOST_CHANGE}
"""Events that resident tensors do not have."""


def moved_history(
    graph: Graph, tensor: int, events: list[tuple[int, str]], length: int
) -> MovedHistory | None:
    """Return the history of a tensor that lives on the host between steps, or on the device with a
    stale host copy; None for any other tensor."""
    own = [event for _, event in events if event in OWN]
    if tensor not in graph.movable or not own:
        return None
    return MovedHistory(
        graph, tensor, length, from_before=graph.repeated and own[0] == SwapOut.__name__
    )


def on_host(graph: Graph, instruction: object) -> int | None:
    """Return the host memory of a Compute that the host runs; None: the device runs it."""
    if not isinstance(instruction, Compute) or instruction.implementation is None:
        return None
    for choice in graph.operators[instruction.op].implementations:
        if choice.name == instruction.implementation and choice.on_host:
            return choice.workspace_bytes
    return None


def is_changed(graph: Graph, operator: Operator, tensor: int) -> bool:
    """Return whether an operator changes a resident tensor that it reads: updates that write
    nothing change parameters and optimizer state."""
    in_place = operator.phase is Phase.UPDATE and not operator.writes
    kind = graph.tensors[tensor].kind
    return in_place and kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE)


class MovedHistory:
    """The history of one moved tensor, from the program's first instruction to its last."""

    def __init__(
        self, graph: Graph, tensor: int, length: int, *, from_before: bool = False
    ) -> None:
        self.name = graph.tensors[tensor].name
        self.tensor = tensor
        self.length = length
        self.device: list[LiveRange] = []
        self.host = [LiveRange(tensor, -1, length)]
        self.found: list[Violation] = []
        self.from_before = from_before
        self.live_since = -1 if from_before else None
        self.stale = from_before
        self.leaving = False

    def step(self, i: int, event: str) -> None:
        """Check one event and follow it as far as it makes sense."""
        live = self.live_since is not None
        if event == "read":
            self._need(live, Code.READ_ON_HOST, i)
        elif event == "change":
            self._need(not self.leaving, Code.CHANGED_WHILE_COPIED, i)
            self.stale = True
        elif event == HOST_CHANGE:
            self._need(not live, Code.UPDATED_IN_BOTH, i)
        elif event == "SwapIn":
            self._need(not live, Code.SWAP_IN_WHILE_LIVE, i)
            self.live_since, self.leaving = i, False
        elif event == "SwapOut":
            self._need(live, Code.SWAP_OUT_ABSENT, i)
            self._need(self.stale or not live, Code.SWAP_OUT_TWICE, i)
            self.stale, self.leaving = False, True
        elif event == "Free":
            self._need(live, Code.FREED_ABSENT, i)
            self._need(not self.stale or not live, Code.CHANGE_LOST, i)
            self._end(i)
        elif event == "DropHost":
            self._need(False, Code.HOME_DROPPED, i)

    def finish(self) -> None:
        """Check the tensor's state at the end of the program."""
        if self.from_before:
            self._need(self.live_since is not None and self.stale, Code.NOT_LEFT, self.length)
        else:
            self._need(self.live_since is None, Code.LEFT_ON_DEVICE, self.length)
        self._end(self.length)

    def _need(self, condition: bool, code: ViolationCode, i: int) -> None:
        if not condition:
            self.found.append(Violation(code, i, f"{self.name!r}"))

    def _end(self, i: int) -> None:
        if self.live_since is not None:
            self.device.append(LiveRange(self.tensor, self.live_since, i))
        self.live_since, self.leaving = None, False

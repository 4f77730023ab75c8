"""Lower bounds on the time of whole steps with movable tensors: the link's transfers, the device's
computations, and the host's share of these."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memopt.models.bounds import (
    choices_of,
    compute_time_s,
    needed_operators,
    sure_reads,
    time_lower_bound,
)
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.programs.moved import changed_by

SAFETY = 1 - 1e-9
"""Factor on a linear program's value, for its solver's tolerance."""


def link_bound_s(graph: Graph, budget_bytes: int, device: Device) -> float:
    """Bound the time of any program of a step with movable tensors within a budget, in s.

    The bound holds whatever is recomputed. Tensors that the forward reads and the budget cannot
    hold are fetched before the loss boundary. Those that the backward and the updates read are
    fetched after it, while tensors that updates change and the budget cannot hold go back. Forward
    and backward each take at least that long, and as long as their operators. (Latencies are left
    out; a link without duplex carries both directions one after the other.)

    Where the host may run updates, each is split freely between host and device: a linear program
    over the shares, which adds the host's time and the gradients' copies.
    """
    need = _needed(graph)
    held = budget_bytes - (graph.resident_bytes - graph.movable_bytes)
    into, out = device.swap_in_bytes_per_s, device.to_host_bytes_per_s
    fetched_s = max(0, need.bytes(need.read[1]) - held) / into
    returned_s = max(0, need.bytes(need.changed) - held) / out
    link_s = max(fetched_s, returned_s) if device.duplex else fetched_s + returned_s
    forward_s = max(need.compute_s[0], max(0, need.bytes(need.read[0]) - held) / into)
    halves_s = forward_s + max(need.compute_s[1], link_s)
    if need.choices:
        halves_s = _shared_s(need, held, device)
    return max(halves_s, time_lower_bound(graph))


@dataclass
class _HostedUpdate:
    """An update that the host may run.

    Attributes:
        compute_s, host_s: seconds if the device, or the host, runs it.
        read: bytes that only this update reads on the device.
        changed: bytes that go back if the device runs it.
        gradients: bytes that go to the host if the host runs it.
        fetched: changed bytes that the forward reads. If the host runs the update, every step
            fetches them anew.
    """

    compute_s: float
    host_s: float
    read: int
    changed: int
    gradients: int
    fetched: int


@dataclass
class _Needed:
    """What every program has to do; pairs are (before the loss boundary, after it).

    Attributes:
        compute_s: seconds of the operators.
        read: movable tensors that the operators read.
        changed: movable tensors that updates change on the device.
        choices: the updates that the host may run; the other fields leave them out.
    """

    sizes: list[int]
    compute_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    read: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    changed: set[int] = field(default_factory=set)
    choices: list[_HostedUpdate] = field(default_factory=list)

    def bytes(self, tensors: set[int]) -> int:
        """Sum the sizes of tensors."""
        return sum(self.sizes[t] for t in tensors)


def _needed(graph: Graph) -> _Needed:
    need = _Needed([tensor.size_bytes for tensor in graph.tensors])
    movable, early = set(graph.movable), _before_boundary(graph)
    hosted: list[Operator] = []
    for index in needed_operators(graph):
        operator, after = graph.operators[index], index >= graph.first_backward
        if any(choice.on_host for choice in choices_of(operator)):
            hosted.append(operator)
        elif after or index in early:
            need.compute_s[after] += compute_time_s(operator)
            need.read[after].update(movable & sure_reads(operator))
            need.changed.update(movable.intersection(changed_by(graph, operator)))
    users: dict[int, int] = {}
    for operator in hosted:
        for tensor in set(operator.reads):
            users[tensor] = users.get(tensor, 0) + 1
    for operator in hosted:
        own = {t for t in operator.reads if users[t] == 1}
        choices = choices_of(operator)
        need.choices.append(
            _HostedUpdate(
                min((c.time_s for c in choices if not c.on_host), default=0.0),
                min(c.time_s for c in choices if c.on_host),
                need.bytes(own & movable - need.read[1]),
                need.bytes(own.intersection(changed_by(graph, operator), movable)),
                need.bytes(own - graph.resident),
                need.bytes(own.intersection(changed_by(graph, operator)) & need.read[0]),
            )
        )
    return need


def _shared_s(need: _Needed, held: int, device: Device) -> float:
    """Solve the linear program: least forward + backward over the host's share of each update.

    Variables: the two halves' times, and for each update the share that the host runs.
    """
    from scipy.optimize import linprog

    def column(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in need.choices], dtype=np.float64)

    into, out = device.swap_in_bytes_per_s, device.to_host_bytes_per_s
    compute_s, host_s, read = column("compute_s"), column("host_s"), column("read")
    changed, gradients, fetched = column("changed"), column("gradients"), column("fetched")
    stays = need.bytes(need.changed) - held
    in_bytes = need.bytes(need.read[1]) + read.sum() - held
    back_bytes = stays + changed.sum()
    rows = [
        (0, np.zeros_like(read), need.compute_s[0]),
        (0, np.zeros_like(read), (need.bytes(need.read[0]) - held) / into),
        (0, fetched / into, 0.0),
        (1, -compute_s, need.compute_s[1] + compute_s.sum()),
        (1, -read / into, in_bytes / into),
        (1, gradients / out, 0.0),
        (1, (gradients - changed) / out, back_bytes / out),
        (1, host_s, 0.0),
    ]
    if not device.duplex:
        rows.append((1, gradients / out - read / into, in_bytes / into))
        both = in_bytes / into + back_bytes / out
        rows.append((1, (gradients - changed) / out - read / into, both))
    # time of the half >= shares * row + constant
    left = np.zeros((len(rows), 2 + len(need.choices)))
    for number, (half, shares, _) in enumerate(rows):
        left[number, half] = -1.0
        left[number, 2:] = shares
    right = [-constant for _, _, constant in rows]
    cost = np.zeros(left.shape[1])
    cost[:2] = 1.0
    bounds = [(0.0, None)] * 2 + [(0.0, 1.0)] * len(need.choices)
    found = linprog(cost, A_ub=left, b_ub=right, bounds=bounds, method="highs")
    return SAFETY * float(found.fun) if found.status == 0 else 0.0


def _before_boundary(graph: Graph) -> frozenset[int]:
    """Find forward operators that the outputs depend on: they run before the loss boundary."""
    found: set[int] = set()
    waiting = [graph.producer[t] for t in graph.outputs if t in graph.producer]
    while waiting:
        index = waiting.pop()
        if index not in found and index < graph.first_backward:
            found.add(index)
            reads = sure_reads(graph.operators[index])
            waiting += [graph.producer[t] for t in reads if t in graph.producer]
    return frozenset(found)

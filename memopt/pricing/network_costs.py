"""Measures costs of collectives: every rank of the group takes part, in the same order.

A collective runs a fixed number of times, never until it is precise, and is never cached: a rank
that stopped earlier, or knew the cost, would leave the others waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch

from memopt.models.device import in_blocks
from memopt.pricing.cache import Cost
from memopt.pricing.memory import metered_sections
from memopt.step.backend import backend_of, timed
from memopt.step.collectives import is_collective, waited
from memopt.step.ranks import meet
from memopt.step.signature import Signature, StandIns

ROUNDS = 5


def network_costs(signatures: Iterable[Signature], device: torch.device) -> dict[str, Cost]:
    """Return the costs of collectives among kernel calls, by their texts: the median of `ROUNDS`
    rounds from call to end of wait. Calls of a fake process group take no time."""
    distinct = {one.text: one for one in signatures if is_collective(one.target)}
    if not distinct:
        return {}
    meet()
    stand_ins = StandIns(device)
    return {text: _cost(one, stand_ins, device) for text, one in distinct.items()}


def _cost(one: Signature, stand_ins: StandIns, device: torch.device) -> Cost:
    args, kwargs = stand_ins.arguments(one)
    results: list[Any] = []

    def run() -> None:
        results[:] = [one.target(*args, **kwargs)]
        waited(results[0])

    with torch.no_grad():
        run()
        times = [timed(run, device) for _ in range(ROUNDS)]
        results.clear()
        (use,) = metered_sections(device, [lambda: run])
    tensors = results[0] if isinstance(results[0], (list, tuple)) else results
    block = backend_of(device).block_bytes
    sizes = tuple(in_blocks(tensor.untyped_storage().nbytes(), block) for tensor in tensors)
    return Cost(statistics.median(times), max(0, use.peak_bytes - sum(sizes)), sizes)

"""A lower bound on the memory of every schedule of a chain, from its stages alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from memopt.models.chain import Chain


def chain_memory_lower_bound(chain: Chain, *, transfers: bool = True) -> int:
    """Bytes, resident included: the largest working set of a step.

    Args:
        chain: the chain.
        transfers: whether schedules may move a^0 to the host and hold no gradient during the
            forward (the offloading model); False gives the tighter bound of schedules that only
            recompute.
    """
    return chain.resident_bytes + max(_working_sets(chain, transfers))


def _working_sets(chain: Chain, transfers: bool) -> Iterator[int]:
    """Bytes, without the resident ones, at moments that no valid schedule avoids."""
    stages = chain.stages
    count = len(chain)
    parameter_bytes = [stage.parameter_gradient_bytes for stage in stages]
    # later[k]: parameter gradients of the stages after k, there once B^{k+1} has run.
    later = [*accumulate(reversed(parameter_bytes), initial=0)][::-1]
    last_gradient = 0 if transfers else chain.gradient_bytes(count)
    held_gradient = last_gradient
    for index in range(count, 0, -1):
        stage = stages[index - 1]
        held_input = 0 if transfers or index == 1 else chain.input_bytes
        before = _activation_or_saved(chain, index - 1) + held_input
        saving = stage.saved_bytes + stage.forward_overhead_bytes
        passing = stage.output_bytes + stage.no_save_overhead_bytes
        if not transfers:
            # F_all^ℓ runs while some δ^j, j ≥ ℓ, is held.
            held_gradient = min(held_gradient, chain.gradient_bytes(index) + later[index])
        yield before + min(saving, passing) + last_gradient
        yield before + saving + held_gradient
        yield (
            before
            + stage.saved_bytes
            + chain.gradient_bytes(index)
            + chain.gradient_bytes(index - 1)
            + stage.backward_overhead_bytes
            + later[index - 1]
        )


def _activation_or_saved(chain: Chain, index: int) -> int:
    """The smaller of a^index and ā^index, either of which can be read."""
    if index == 0:
        return chain.input_bytes
    return min(chain.activation_bytes(index), chain.stages[index - 1].saved_bytes)

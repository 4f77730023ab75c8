"""The memory of a program together with a training loop's charges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.graph import Graph, TensorKind
from memopt.programs.first_half import halved_bytes
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import bytes_during, lifetimes
from memopt.programs.replay import Timeline, outside_bytes, replay


def with_charges(graph: Graph, charges: Charges) -> Graph:
    """Add the charges of the loop to a graph: resident bytes, its loss, and output gradients that
    it holds."""
    return replace(
        graph,
        tangents_held=graph.tangents_held or bool(charges.given_gradients),
        boundary_bytes=graph.boundary_bytes + charges.boundary_bytes,
        extra_resident_bytes=graph.extra_resident_bytes + charges.resident_bytes,
    )


def needed_bytes(graph: Graph, program: Program, charges: Charges) -> int:
    """Return the peak of a step with all charges beside its graph, total bytes.

    An arena is allocated for the whole step, so all charges add to a placed program's peak.
    """
    others_bytes = waiting_bytes(graph, program, charges)
    charged = with_charges(graph, charges)
    timeline = _timeline(charged, program, charges)
    until_loss = charges.forward_bytes + charges.held_bytes
    at_once = max(until_loss, charges.update_bytes)  # never there together
    joined_bytes = 2 * charges.joined_calls * _bytes_of(graph, graph.outputs)
    joined_bytes += charged.resident_bytes + (timeline.arena_bytes or 0)
    if timeline.placed_peak_bytes is not None:
        return max(timeline.placed_peak_bytes + at_once + others_bytes, joined_bytes)
    boundary, steps = program.boundary, timeline.step_bytes
    if boundary is None or not at_once:
        return max(timeline.peak_bytes + at_once + others_bytes, joined_bytes)
    forward_bytes = max(steps[:boundary], default=graph.resident_bytes)
    needed = max(
        timeline.peak_bytes,
        forward_bytes + until_loss,
        steps[boundary] + charges.held_bytes,
        timeline.live_bytes[-1] + charges.update_bytes,
    )
    return max(others_bytes + needed, joined_bytes)


def _timeline(graph: Graph, program: Program, charges: Charges) -> Timeline:
    """Return the timeline of a program. If its graph is kept, the backward frees no saved tensor,
    and copies those that it would overwrite, or the whole arena. Gradients of outputs that the loop
    holds are not freed either. Of the live bytes only the last are looked at."""
    timeline = replay(graph, program)
    boundary, steps = program.boundary, timeline.step_bytes
    if boundary is None or not (charges.kept_graphs or charges.given_gradients):
        return timeline
    keeps, arena_bytes = bool(charges.kept_graphs), timeline.arena_bytes
    given = frozenset(graph.tangents) if charges.given_gradients else frozenset()
    placed = _placed(program)
    if arena_bytes is not None:
        steps = outside_bytes(graph, program, steps)
    live = [x for x in lifetimes(graph, program).device if x.tensor not in graph.resident]
    saved = [x for x in live if keeps and x.is_live_at(boundary) and x.key not in placed]
    held = [*saved, *(x for x in live if x.tensor in given)]
    held_bytes = sum(graph.tensors[x.tensor].size_bytes for x in held)
    freed = [x for x in held if not x.overwritten]
    there_bytes = bytes_during(graph, freed, len(program))
    later = [a + held_bytes - b for a, b in zip(steps, there_bytes, strict=True)][boundary + 1 :]
    found = (*steps[: boundary + 1], *later)
    if arena_bytes is not None:
        most_bytes = max(found) + (2 if keeps else 1) * arena_bytes
        return replace(timeline, placed_peak_bytes=most_bytes)
    gone_bytes = sum(graph.tensors[x.tensor].size_bytes for x in held if not x.stays)
    after = (*timeline.live_bytes[:-1], timeline.live_bytes[-1] + gone_bytes)
    return replace(timeline, step_bytes=found, live_bytes=after, peak_bytes=max(found))


def backward_bytes(graph: Graph, program: Program, charges: Charges = NO_CHARGES) -> int:
    """Return the peak of a step once its backward has begun, total bytes, with the charges' other
    calls that await their backward."""
    timeline = _timeline(graph, program, charges)
    peak_bytes = timeline.placed_peak_bytes or timeline.peak_bytes
    if timeline.placed_peak_bytes is None and program.boundary is not None:
        later = timeline.step_bytes[program.boundary + 1 :]
        peak_bytes = max(later, default=graph.resident_bytes)
    return peak_bytes + waiting_bytes(graph, program, charges)


def waiting_bytes(graph: Graph, program: Program, charges: Charges) -> int:
    """Return the bytes of other calls that await their backward: what they keep with their
    outputs (or between the halves of their backward, if that is more), gradients to be added up,
    copies of gradients, and buffers for outputs."""
    calls, halved = charges.waiting_calls, charges.halved_calls
    kept_bytes = held_bytes(graph, program, outputs=True) if calls else 0
    more_bytes = max(0, halved_bytes(graph, program) - kept_bytes) if halved else 0
    added_bytes = charges.added_calls * max(0, _bytes_of(graph, graph.gradients) - kept_bytes)
    output_bytes = charges.output_calls * _bytes_of(graph, graph.outputs)
    own = set(graph.gradients).difference(graph.input_gradients)
    added_bytes += charges.kept_gradients * _bytes_of(graph, own)
    return calls * kept_bytes + halved * more_bytes + added_bytes + output_bytes


def _bytes_of(graph: Graph, tensors: Iterable[int]) -> int:
    return sum(graph.tensors[one].size_bytes for one in set(tensors) - graph.resident)


def held_bytes(graph: Graph, program: Program, outputs: bool = False) -> int:
    """Return the bytes that a step keeps from its forward for its backward: its arena, and what is
    saved outside of it. An output counts if the backward reads it; others only with `outputs`,
    which assumes that the caller keeps them."""
    boundary = program.boundary
    if boundary is None:
        return 0
    dropped, placed = () if outputs else graph.outputs, _placed(program)
    found = {
        one.tensor
        for one in lifetimes(graph, program).device
        if one.is_live_at(boundary)
        and one.key not in placed
        and (one.tensor not in dropped or any(at > boundary for at in one.readers))
    }
    kept = found - graph.resident - set(graph.tangents)
    kept_bytes = sum(graph.tensors[tensor].size_bytes for tensor in kept)
    return kept_bytes + (replay(graph, program).arena_bytes or 0)


def _placed(program: Program) -> set[tuple[int, int]]:
    return {(at, tensor) for at, tensor, _ in program.offsets or ()}


def inputs_let_go(graph: Graph, program: Program) -> int:
    """Return the bytes of the step's inputs that its backward does not read."""
    later = program.instructions[program.boundary or 0 :]
    read = {tensor for one in later for tensor in one.effects(graph).reads}
    own = [i for i, one in enumerate(graph.tensors) if one.kind is TensorKind.INPUT]
    return sum(graph.tensors[i].size_bytes for i in own if i not in read)


def forward_bytes(graph: Graph, program: Program) -> int:
    """Return the peak of a step's forward, total bytes."""
    timeline = replay(graph, program)
    steps, arena_bytes = timeline.step_bytes, timeline.arena_bytes or 0
    if program.offsets is not None:
        steps = outside_bytes(graph, program, steps)
    return arena_bytes + max(steps[: program.boundary], default=graph.resident_bytes)

"""Updates that follow each other run as one, as long as the program's peak stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.executor.step_updates import updates_together
from memopt.models.graph import Graph, Operator, Phase, Tensor
from memopt.passes.passes import place_program
from memopt.programs.instructions import Compute, Free, LossBoundary, Program


def _graph(peak_bytes: int, workspace_bytes: int = 10) -> Graph:
    """Three gradients of 100 bytes and their updates; the kernel before takes `peak_bytes`."""
    tensors = [Tensor(f"gradient {i}", 100) for i in range(3)]
    backward = [
        Operator(f"make {i}", (), (i,), 1.0, workspace_bytes=peak_bytes - 300 if i == 2 else 0)
        for i in range(3)
    ]
    updates = [
        Operator(f"update {i}", (i,), (), 1.0, workspace_bytes=workspace_bytes, phase=Phase.UPDATE)
        for i in range(3)
    ]
    operators = [replace(one, phase=Phase.BACKWARD) for one in backward] + updates
    return Graph(tensors, operators)


END = [x for i in range(3) for x in (Compute(3 + i, ()), Free(i))]
PROGRAM = Program([LossBoundary(), *(Compute(i, (i,)) for i in range(3)), *END])


@pytest.mark.parametrize(
    ("peak_bytes", "most_bytes", "found"),
    [
        (330, None, {4: (4, 6, 8)}),
        (329, None, {4: (4, 6)}),
        # The first is freed before the other two.
        (310, None, {6: (6, 8)}),
        (330, 200, {4: (4, 6)}),
        (330, 199, {}),
        (300, 199, {}),
    ],
)
def test_they_have_room_for_all_their_workspaces(
    peak_bytes: int, most_bytes: int | None, found: dict[int, tuple[int, ...]]
) -> None:
    assert updates_together(_graph(peak_bytes), PROGRAM, most_bytes) == found


def test_a_kernel_between_them_ends_what_runs_together() -> None:
    early = [x for i in range(3) for x in (Compute(i, (i,)), Compute(3 + i, ()), Free(i))]
    assert updates_together(_graph(500), Program([LossBoundary(), *early])) == {}


def test_with_an_arena_there_must_be_room_outside() -> None:
    """The gradients are in the arena, whose size stays as it is."""
    placed, _ = place_program(_graph(500), PROGRAM)
    assert updates_together(_graph(500), placed) == {4: (4, 6, 8)}
    # Nothing but the updates' own workspaces is outside.
    placed, _ = place_program(_graph(300), PROGRAM)
    assert updates_together(_graph(300), placed) == {}

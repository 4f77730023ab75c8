"""The schedule of FSDP2 with checkpointed blocks, as a program: every block runs its forward again
before its backward, with its weights gathered again (`reshard_after_forward`).

Blocks are those of the model's lists: operators whose module's path has the same beginning up to
its first number ("layers.3").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from memopt.models.graph import Graph, Phase
from memopt.programs.instructions import Program
from memopt.programs.liveness import computes, with_frees
from memopt.reductions.lower import without_unread_reruns


def block_of(path: str) -> str:
    """Return the block of a module, by its path; "" if it is in none."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def forward_of_blocks(graph: Graph) -> dict[str, list[int]]:
    """Map each block, in forward order, to its forward operators, in the graph's order."""
    blocks: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        block = block_of(operator.module)
        if block and operator.phase is Phase.FORWARD:
            blocks.setdefault(block, []).append(index)
    return blocks


def largest_sent_bytes(graph: Graph) -> int:
    """Return the most bytes that the collectives of one block send in forward and backward."""
    sent: dict[str, int] = {}
    for operator in graph.operators:
        block = block_of(operator.module)
        if block and operator.collective is not None:
            sent[block] = sent.get(block, 0) + operator.collective.size_bytes
    return max(sent.values(), default=0)


def run_again(graph: Graph, again: Mapping[str, Collection[int]]) -> Program:
    """Build the step in which forward operators of blocks run again before the block's backward.

    Args:
        graph: the step.
        again: block → its operators that may run again; those run whose results the backward reads.
    """
    waiting = {block: sorted(chosen) for block, chosen in again.items()}
    order: list[int] = []
    for index, operator in enumerate(graph.operators):
        if operator.phase is not Phase.FORWARD:
            order += waiting.pop(block_of(operator.module), ())
        order.append(index)
    return Program(with_frees(graph, without_unread_reruns(graph, computes(graph, order))))


def checkpointed(
    graph: Graph, blocks: Mapping[str, Sequence[int]], kept: Collection[int] = ()
) -> Program:
    """Build the step with checkpointed blocks.

    Args:
        graph: the step.
        blocks: its `forward_of_blocks`.
        kept: forward operators in blocks whose results stay for the backward. The gathered weights
            of the last block always stay: its backward comes next.
    """
    last = next(reversed(list(blocks)), "")
    again = {
        name: [
            i
            for i in members
            if graph.operators[i].recomputable
            and i not in kept
            and (name != last or graph.operators[i].collective is None)
        ]
        for name, members in blocks.items()
    }
    return run_again(graph, again)


def by_worth(
    graph: Graph, blocks: Mapping[str, Sequence[int]], collectives: bool
) -> list[tuple[int, ...]]:
    """Rank forward operators of blocks by the time that keeping their results saves per byte, the
    most first; of equal layers the last first, since its results are kept for the shortest time.

    Args:
        graph: the step.
        blocks: its `forward_of_blocks`.
        collectives: whether to rank gathered weights too. Keeping them saves nothing where the
            network is hidden behind computation.
    """
    worth: list[tuple[float, int, int]] = []
    for number, members in enumerate(reversed(list(blocks.values()))):
        for index in members:
            operator = graph.operators[index]
            if collectives or operator.collective is None:
                size_bytes = sum(graph.tensors[t].size_bytes for t in operator.writes)
                worth.append((-operator.time_s / max(1, size_bytes), number, index))
    return [(index,) for _, _, index in sorted(worth)]

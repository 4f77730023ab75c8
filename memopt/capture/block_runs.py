"""Numbers the parts of a joint graph's two runs of equal blocks, and names the copies of them."""

from __future__ import annotations

import re
from typing import Any

from torch.fx import Node

from memopt.capture.equal_blocks import CUT
from memopt.models.periods import BlockRun, run_of

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


class CopiedNames:
    """The names and sequence numbers that the whole graph's trace gives."""

    def __init__(self, nodes: list[Node], runs: tuple[BlockRun, BlockRun], left_out: int) -> None:
        self._runs, self._left_out = runs, left_out
        self._given = [_numbered(node.name) for node in nodes]
        self._sequence = [node.meta.get("seq_nr") for node in nodes]
        self._steps = [self._step(run) for run in runs]
        forward = runs[0]
        ones = [self._sequence_step(forward, o) for o in range(forward.parts.length)]
        self._per_block = max((one for one in ones if one is not None), default=0)
        self._ends = forward.at(CUT, forward.parts.length - 1), runs[1].at(CUT, 0)
        before = self._sequence[: self._ends[0] + 1]
        self._latest = max((one for one in before if one is not None), default=0)
        self._all: list[str] = []

    def of(self, place: int, number: int | None = None) -> str:
        """Return the name of an operator, or of its copy in another part."""
        base, count = self._given[place]
        forward_end, backward_start = self._ends
        if place > forward_end:
            count += self._left_out * self._steps[0].get(base, 0)
        if number is None:
            if place >= backward_start:
                count += self._left_out * self._steps[1].get(base, 0)
        elif place > forward_end:
            # Parts go down: the copy of the highest number comes first, after part CUT + 1.
            count += (self._left_out - (number - CUT)) * self._steps[1].get(base, 0)
        else:
            count += (number - CUT) * self._steps[0].get(base, 0)
        self._all.append(f"{base}_{count}" if count else base)
        return self._all[-1]

    def unique(self) -> bool:
        """Whether all names that were given differ."""
        return len(self._all) == len(set(self._all))

    def sequence(self, place: int, number: int | None = None) -> Any:
        """Return autograd's sequence number of an operator, or of its copy in another part."""
        found = self._sequence[place]
        if found is None:
            return None
        run = run_of(self._runs, place)
        if run is None:
            up = found > self._latest
        elif self._sequence_step(run, run.offset(place)) == 0:
            up = True
        elif number is not None:
            return found + self._per_block * (number - CUT)
        else:
            up = run.number(place) > CUT
        return found + (self._left_out * self._per_block if up else 0)

    def _sequence_step(self, run: BlockRun, offset: int) -> Any:
        a, b = (self._sequence[run.at(number, offset)] for number in (CUT, CUT + 1))
        return None if a is None or b is None else b - a

    def _step(self, run: BlockRun) -> dict[str, int]:
        """Return by how much each name's number grows from part to part, as they are traced."""
        found: dict[str, int] = {}
        for offset in range(run.parts.length):
            (base, low), (_, high) = (
                self._given[run.at(number, offset)] for number in (CUT, CUT + 1)
            )
            found[base] = (high - low) * run.way
        return found


def _numbered(name: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], int(match[2] or 0)

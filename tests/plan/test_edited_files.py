"""Plan files that were edited, their checksum right: what is wrong with one is refused in a
sentence, and what runs all the same equals the unplanned step, within the file's budget."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.errors import MemoptError
from memopt.executor.check import unmetered_bytes
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import encode
from memopt.stages import capturing
from memopt.step.backend import autocast_state
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from tests.plan.edited import CPU, MADE, build, decode, refigured, step


@pytest.fixture(scope="module", params=MADE)
def value(request: pytest.FixtureRequest) -> Any:
    """The content of a real plan file."""
    return json.loads(json.dumps(encode(MADE[request.param]())))


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a model is captured once, however many files are applied to it."""
    known: dict[str, Captured] = {}
    real = capturing.capture

    def capture(model: nn.Module, call: Call, unused: Callable[[], Any], *rest: Any) -> Captured:
        leaves = [
            (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
            for x in call.leaves
        ]
        key = repr((id(model), leaves, call.spec, unused(), autocast_state()))
        if key not in known:
            known[key] = real(model, call, unused, *rest)
        return known[key]

    monkeypatch.setattr(capturing, "capture", capture)


class Reference:
    """The unplanned step, and what an edited file may do beside it."""

    def __init__(self) -> None:
        self.model = build()
        self.expected, _ = step(self.model, self.model)

    def attempt(self, value: Any) -> str:
        """ "refused" or "ran"; anything else fails.

        Args:
            value: the content of an edited file.
        """
        data = pack(value)
        reason = ""
        try:
            found = decode(unpack(data))
            module = found.apply(self.model)
            step(self.model, module)
            after, peak_bytes = step(self.model, module)
        except MemoptError as error:
            reason = str(error)
        except ValueError as error:
            # What `apply` says of plans without a record, and of those of whole steps.
            if not re.search("made from a cost model|is of a whole step", str(error)):
                raise
            reason = str(error)
        if reason:
            assert "\n" not in reason
            return "refused"
        assert all(map(torch.equal, after, self.expected))
        if found.budget is not None:
            assert unmetered_bytes(found, CPU) + peak_bytes <= found.budget
        return "ran"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value, containers included."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edited(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    at(changed, path[:-1])[path[-1]] = new
    return changed


TEXTS = (
    *("activation", "gradient", "parameter", "buffer", "input", "constant", "output"),
    *("forward", "backward", "update", "compute", "free", "loss", "swap out"),
    *("", "x", "y\nz", "cuda", "float64", "bool", "float16"),
)
NUMBERS = (0, 1, 2, 3, 7, 64, -1, 2**40, 2**53)


def others(old: Any, rng: random.Random) -> list[Any]:
    """What to write instead of a value: of its own type, mostly."""
    if isinstance(old, bool):
        return [not old]
    if isinstance(old, int):
        return [rng.choice((old - 1, old + 1, old * 2)), rng.choice(NUMBERS)]
    if isinstance(old, float):
        return [rng.choice((0.0, old * 2, -1.0, 1e308))]
    if isinstance(old, str):
        return rng.sample(TEXTS, 2)
    if isinstance(old, list):
        return [rng.choice(([], old[:-1], old[::-1], old + old[:1]))]
    return [rng.choice((None, {}, [], 0, "x"))]


def sweep(value: Any, edits: int, seed: int) -> list[str]:
    """Edit so many places of every part of a file; how it went."""
    rng = random.Random(seed)
    reference = Reference()
    assert reference.attempt(value) == "ran"
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for path in places(value):
        parts.setdefault(path[0], []).append(path)
    outcomes = []
    for part, paths in parts.items():
        for path in rng.sample(paths, min(edits, len(paths))):
            for new in others(at(value, path), rng):
                changed = edited(value, path, new)
                outcomes.append(reference.attempt(changed))
                harmful = refigured(changed) if part in ("graph", "program", "device") else None
                if harmful is not None:
                    outcomes.append(reference.attempt(harmful))
    return outcomes


def test_edits_anywhere(value: Any, captured_once: None) -> None:
    outcomes = sweep(value, 8, seed=0)
    assert outcomes.count("refused") > len(outcomes) / 3
    assert "ran" in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_edits_anywhere(value: Any, seed: int, captured_once: None) -> None:
    sweep(value, 150, seed)

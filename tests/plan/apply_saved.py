"""Plan files applied in a new process: what a step leaves behind, to the bit.

    python -m tests.plan.apply_saved SUBJECT=PATH...

A subject is "tiny:NAME" (tests.plan.tiny) or "zoo:NAME" (a family). Prints one JSON object:
path → [digest of the loaded program, digest of a step].
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

import memopt
from memopt.programs.instructions import Program
from memopt.programs.serialize import dumps
from memopt.stages import capturing
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from tests.plan import tiny
from tests.zoo import get

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Subject:
    """A model with the same weights every time, its inputs and its loss."""

    build: Callable[[], nn.Module]
    inputs: Any
    loss: Callable[[Any], Tensor]


def subject(name: str) -> Subject:
    """The subject of a name."""
    kind, _, rest = name.partition(":")
    if kind == "tiny":
        _, inputs, loss = tiny.make(rest)
        return Subject(lambda: tiny.make(rest)[0], inputs, loss)
    family = get(rest)
    return Subject(lambda: family.build("tiny"), family.inputs("tiny"), family.loss)


def step_digest(one: Subject, module: nn.Module) -> str:
    """What a step of the subject leaves behind, bit for bit."""
    return tiny.digest_of_step(module, one.inputs, one.loss)


def program_digest(program: Program | None) -> str:
    """SHA-256 of a program's canonical bytes."""
    assert program is not None
    return hashlib.sha256(dumps(program)).hexdigest()


def applied_elsewhere(subjects: Mapping[Path, str], timeout_s: float) -> dict[Path, list[str]]:
    """Path → [program's digest, step's digest], from one new process for all plan files."""
    finished = subprocess.run(
        [sys.executable, "-m", __name__, *(f"{name}={path}" for path, name in subjects.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return {Path(path): digests for path, digests in json.loads(finished.stdout).items()}


def main() -> None:
    """In the new process."""
    found = {}
    models: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {}
    captures: dict[int, Captured] = {}

    def captured_once(model: nn.Module, example: Call, *rest: Any) -> Captured:
        if id(model) not in captures:
            captures[id(model)] = real(model, example, *rest)
        return captures[id(model)]

    real = capturing.capture
    with mock.patch.object(capturing, "capture", captured_once):
        for argument in sys.argv[1:]:
            name, _, path = argument.partition("=")
            plan = memopt.load(path)
            one = subject(name)
            if name not in models:
                model = one.build()
                models[name] = model, {k: v.clone() for k, v in model.state_dict().items()}
            model, state = models[name]
            model.load_state_dict(state)
            model.zero_grad(set_to_none=True)
            # Without inputs: they come from the file.
            found[path] = [program_digest(plan.program), step_digest(one, plan.apply(model))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

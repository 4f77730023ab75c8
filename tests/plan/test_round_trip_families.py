"""All families × strategies: saved, loaded in a new process, applied; the same step, to the bit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.serialize import dumps
from memopt.plan import Plan
from memopt.profiler import Loss, MeasureOptions, Profiled, profile_model
from memopt.strategies import STRATEGIES, Strategy
from tests.zoo import FAMILIES, Family, call, get

ROOT = Path(__file__).parent.parent.parent
TIME_LIMIT_S = 5.0


def step_digest(family: Family, module: nn.Module) -> str:
    """SHA-256 of a step's outputs, gradients, buffers and the next random draw."""
    torch.manual_seed(7)
    output = call(module, family.inputs("tiny"))
    family.loss(output).backward()
    values = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    values += [p.grad for _, p in sorted(module.named_parameters()) if p.grad is not None]
    values += [buffer for _, buffer in sorted(module.named_buffers())]
    values.append(torch.rand(4))
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def planned(one: Profiled, strategy: Strategy) -> Plan | None:
    """A tight plan, or one without limit; None if the strategy cannot plan this model."""
    for budget in ("min", None):
        try:
            return memopt.plan(
                one,
                budget=budget,
                strategy=strategy,
                time_limit_s=TIME_LIMIT_S,
                progress=False,
            )
        except (InfeasibleBudgetError, MemoptError, ValueError):
            continue
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family(family: Family, tmp_path: Path) -> None:
    model, inputs = family.build("tiny"), family.inputs("tiny")
    options = MeasureOptions(cap_s=2.0, max_rounds=3)
    one = profile_model(model, inputs, loss=Loss(family.loss), options=options)
    expected = step_digest(family, family.build("tiny"))
    programs = {}
    for strategy in STRATEGIES:
        plan = planned(one, strategy)
        if plan is None:
            continue
        path = tmp_path / f"{strategy.name}.json"
        plan.save(path)
        assert plan.program is not None
        programs[str(path)] = hashlib.sha256(dumps(plan.program)).hexdigest()
    # What needs a chain finds one in every family; so do the rest, but for a solver's own limits.
    assert len(programs) >= 6
    finished = subprocess.run(
        [sys.executable, "-m", __name__, family.name, *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found == {path: [program, expected] for path, program in programs.items()}


def main() -> None:
    """In the new process: family, then plan files. Prints path → (program's, step's digest)."""
    family = get(sys.argv[1])
    found = {}
    for path in sys.argv[2:]:
        plan = memopt.load(path)
        assert plan.program is not None
        program = hashlib.sha256(dumps(plan.program)).hexdigest()
        found[path] = [program, step_digest(family, plan.apply(family.build("tiny")))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

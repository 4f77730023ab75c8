"""A plan saved, loaded in a new process and applied does the same step, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import memopt
from memopt.api.plan import Plan
from memopt.errors import MemoptError
from memopt.profiler import Profiled
from memopt.programs.serialize import dumps
from memopt.strategies import STRATEGIES, Strategy
from tests.plan.apply_saved import applied_elsewhere, program_digest, step_digest, subject
from tests.plan.tiny import MODELS, make, profiled, tight_plan

pytestmark = pytest.mark.xdist_group("round_trip")
"""In one worker: the plans of all strategies are made once."""


@pytest.fixture(
    scope="module",
    params=[
        name if name == "convolutions" else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, tuple[str, Plan, str]]:
    """Path → (model, plan, digest of an unplanned step), every strategy on a model."""
    folder, name = tmp_path_factory.mktemp("plans"), request.param
    found = {}
    one = profiled(make(name))
    expected = step_digest(subject(f"tiny:{name}"), make(name)[0])
    for strategy in STRATEGIES:
        target = one.graph.to_chain() if strategy.needs == "chain" else one.graph
        if strategy.why_not(target) is not None:
            continue
        plan = _planned(one, strategy)
        path = folder / f"{name}-{strategy.name}.json"
        plan.save(path)
        found[path] = (name, plan, expected)
    return found


def _planned(one: Profiled, strategy: Strategy) -> Plan:
    """The tightest plan that the strategy has soon; one without limit if it knows no smallest
    budget."""
    try:
        return tight_plan(one, strategy, time_limit_s=0.5)
    except MemoptError:
        return memopt.plan(one, strategy=strategy, time_limit_s=0.5, progress=False)


def test_program_is_the_same_bytes(saved: dict[Path, tuple[str, Plan, str]]) -> None:
    assert len(saved) >= 2
    for path, (_, plan, _) in saved.items():
        loaded = memopt.load(path)
        assert plan.program is not None
        assert loaded.program is not None
        assert dumps(loaded.program) == dumps(plan.program)
        assert loaded.chain_steps == plan.chain_steps
        assert loaded.strategy == plan.strategy
        for name in ("status", "budget", "peak_bytes", "resident_bytes", "host_peak_bytes"):
            assert getattr(loaded, name) == getattr(plan, name), name
        for name in ("step_time_s", "lower_bound_s", "gap", "overhead", "baseline", "notes"):
            assert getattr(loaded, name) == getattr(plan, name), name
        assert loaded.summary() == plan.summary()


def test_saving_again_gives_the_same_file(
    saved: dict[Path, tuple[str, Plan, str]], tmp_path: Path
) -> None:
    for path in saved:
        again = tmp_path / "again.json"
        memopt.load(path).save(again)
        assert again.read_bytes() == path.read_bytes()


def test_new_process_does_the_same_step(saved: dict[Path, tuple[str, Plan, str]]) -> None:
    found = applied_elsewhere(
        {path: f"tiny:{name}" for path, (name, _, _) in saved.items()}, timeout_s=240
    )
    assert found == {
        path: [program_digest(plan.program), digest] for path, (_, plan, digest) in saved.items()
    }

"""Regions that stay ATen's: those that do not compile, and those that are slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.kernels.compiled import choice, fuse, inductor
from memopt.kernels.compiled.fusible import is_pointwise
from memopt.step.kernel import PREFIX
from memopt.step.operators import Substitute
from memopt.step.region_graph import Subgraph
from tests.kernels.compiled.steps import inputs, network, step, store_all
from tests.kernels.compiled.test_kernels import fused

pytestmark = pytest.mark.xdist_group("compiled store-all")


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, whose compiled code is on disk."""
    monkeypatch.setattr(fuse, "_RUNS", {})


def test_no_compiler_is_one_clear_error(
    nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(memopt.MemoptError, match=r"install a C\+\+ compiler") as caught:
        memopt.plan(network(), inputs(), kernels="compiled", progress=False)
    assert "kernels='aten'" in str(caught.value)
    memopt.plan(network(), inputs(), progress=False)


@pytest.mark.slow
def test_a_region_that_fails_stays_aten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, all_of_them = store_all()
    monkeypatch.setattr(fuse, "_RUNS", {})
    compile_one = inductor._compile
    first: list[str] = []

    def fails(one: Subgraph) -> Any:
        if not first or one.key == first[0]:
            first[:] = [one.key]
            raise NotImplementedError("this region")
        return compile_one(one)

    monkeypatch.setattr(inductor, "_compile", fails)
    model = network(depth=1)
    plan = memopt.plan(model, inputs(), strategy="store-all", kernels="compiled", progress=False)
    assert first[0] in plan.record.aten_regions
    assert f"{PREFIX}{first[0]}" not in fused(plan)
    assert f"{PREFIX}{first[0]}" in fused(all_of_them)
    assert any("NotImplementedError: this region" in note for note in plan.notes)
    kept = step(model, plan.apply(model))
    least = memopt.plan(plan.profiled, budget="min", progress=False)
    assert step(model, least.apply(model)).same_bits(kept)
    least.save(tmp_path / "plan.json")
    monkeypatch.setattr(inductor, "_compile", compile_one)
    twin = network(depth=1)
    loaded = memopt.load(tmp_path / "plan.json").apply(twin, inputs())
    assert step(twin, loaded).same_bits(kept)


@pytest.mark.slow
def test_the_faster_kernels_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What "auto" leaves to ATen, a plan's file leaves to it, too."""
    model = network()
    slow: list[str] = []

    def slower(*_: Any) -> set[str]:
        found = _[-1]
        slow.extend([found[-1][1].key] if not slow else [])
        return {one.key for _, one in found} & set(slow)

    monkeypatch.setattr(choice, "_slower", slower)
    plan = memopt.plan(model, inputs(), strategy="store-all", kernels="auto", progress=False)
    assert plan.record.aten_regions == tuple(slow)
    assert any("faster" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    twin = network()
    loaded = memopt.load(tmp_path / "plan.json").apply(twin, inputs())
    assert step(twin, loaded).same_bits(step(model, plan.apply(model)))


@pytest.mark.slow
def test_auto_measures() -> None:
    _, everything = store_all()
    plan = memopt.plan(network(), inputs(), strategy="store-all", kernels="auto", progress=False)
    assert 0 < len(fused(plan)) <= len(fused(everything))


@pytest.mark.slow
def test_code_on_disk_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    for _ in range(2):
        monkeypatch.setattr(fuse, "_RUNS", {})
        torch._dynamo.utils.counters.clear()
        memopt.plan(model, inputs(), strategy="store-all", kernels="compiled", progress=False)
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_hit"] == len(fuse._RUNS) > 0
    assert not counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]


def test_compilation_can_be_interrupted(nothing_compiled: None) -> None:
    def stop(_fraction: float, what: str) -> None:
        if what.startswith("compiling region 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memopt.plan(network(), inputs(), kernels="compiled", progress=stop)
    # What waits for compilers was put back.
    assert store_all()[1].peak_bytes
    torch.compile(torch.sin)(inputs())


def test_functions_that_run_in_another_way_are_not_pointwise() -> None:
    function = Substitute(torch.relu, lambda relu, x: relu(x))
    node = torch.fx.Graph().call_function(function)
    assert not is_pointwise(node)

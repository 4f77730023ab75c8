"""Summaries, notebook display and pictures of plans."""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot

import memopt
from memopt.api.plan import Plan
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.instances import rotor_toy
from memopt.models.steps import ChainStep, Move
from memopt.programs.in_place import with_in_place
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain
from memopt.report.memory_profile import program_profile
from memopt.report.module_rows import depth_for, group_of
from memopt.report.peak import peak_of
from memopt.report.work import stage_runs
from tests.models.training_graphs import overwriting
from tests.plan.tiny import make, profiled, tight_plan
from tests.random_programs import random_program
from tests.report.cases import plan_of

KINDS = ("memory", "schedule", "timeline")


def moving_plan(seed: int = 0) -> Plan:
    """A plan with swaps and recomputation over a slow link."""
    rng = random.Random(seed)
    graph = random_graph(rng, 6)
    program = random_program(rng, graph, recomputations=3, swaps=3)
    device = memopt.Device(to_host_bytes_per_s=3.0)
    return plan_of(graph, program, device)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {
        "module": tight_plan(profiled(make("mlp"))),
        "chain": memopt.plan(rotor_toy(), budget="min"),
        "moving": moving_plan(),
    }


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.mark.parametrize("seed", range(30))
def test_profile_of_a_program_is_the_replay(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 5, implementations=True, updates=seed % 2 == 0)
    program = random_program(rng, graph, recomputations=2, swaps=2, reorder=True)
    device = memopt.Device(to_host_bytes_per_s=2.0)
    timeline = replay(graph, program, device)
    profile = program_profile(graph, program, device)
    assert profile.total_bytes == timeline.step_bytes
    assert profile.end_s == timeline.time_s
    peak = peak_of(graph, program, device)
    assert peak is not None
    assert sum(consumer.size_bytes for consumer in peak.consumers) == timeline.peak_bytes


def test_what_is_computed_in_place_is_at_the_peak_once() -> None:
    in_place = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = overwriting(rng, random_graph(rng, 5, implementations=True))
        program = with_in_place(graph, random_program(rng, graph, swaps=2))
        timeline, peak = replay(graph, program), peak_of(graph, program)
        assert program_profile(graph, program).total_bytes == timeline.step_bytes
        assert peak is not None
        assert sum(consumer.size_bytes for consumer in peak.consumers) == timeline.peak_bytes
        run = dict(program.computes).get(timeline.peak_instruction or 0)
        in_place += run is not None and run.in_place is not None
    assert in_place > 0


@pytest.mark.parametrize("seed", range(10))
def test_profile_of_a_chain_is_the_replay(seed: int) -> None:
    chain = random_chain(random.Random(seed), 5)
    plan = memopt.plan(chain, budget="min")
    assert plan.chain_steps is not None
    profile = program_profile(plan.graph, plan.program)
    assert profile.total_bytes == replay(plan.graph, plan.program).step_bytes
    assert max(profile.total_bytes) == replay_chain(chain, plan.chain_steps).peak_bytes


def test_summary_has_the_figures(plans: dict[str, Plan]) -> None:
    plan = plans["module"]
    text = plan.summary()
    assert str(plan) == text
    for part in ("strategy", "budget", "peak", "baseline peak", "step time", "bound", "gap"):
        assert part in text
    assert "recomputed" in text
    assert re.search(r"\d+ runs .* 0(\.linear)?$", text, re.MULTILINE), text
    assert "addmm" in text
    assert "stages" in text


def test_summary_names_what_moves(plans: dict[str, Plan]) -> None:
    assert "moved to the host" in plans["moving"].summary()
    assert "host memory" in plans["moving"].summary()


def test_summary_fits_80_columns(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        assert max(map(len, plan.summary().splitlines())) <= 80
    wide = "very.long." * 12 + "module"
    graph = Graph(
        [Tensor("x" * 90, 8, TensorKind.INPUT), Tensor("a" * 90, 8)],
        [Operator("f" * 70, (0,), (1,), 1.0, module=wide)],
        outputs=[1],
    )
    text = memopt.plan(graph, strategy="store-all").summary()
    assert max(map(len, text.splitlines())) <= 80


def test_html_is_escaped() -> None:
    graph = Graph(
        [Tensor("x", 8, TensorKind.INPUT), Tensor("<script>alert(1)</script>", 8)],
        [Operator("f", (0,), (1,), 1.0, phase=Phase.FORWARD, module="<b>")],
        outputs=[1],
    )
    html = memopt.plan(graph, strategy="store-all")._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<table>") == html.count("</table>") > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["module", "chain", "moving"])
def test_plots(plans: dict[str, Plan], name: str, kind: str) -> None:
    figure, given = pyplot.subplots()
    ax = plans[name].plot(kind, ax=given)
    assert ax is given
    assert re.search(r"\((s|ms|µs)\)|instruction", ax.get_xlabel())
    assert ax.get_legend() is not None
    figure.canvas.draw()
    made = plans[name].plot(kind)
    assert made.figure is not figure


def test_memory_plot_has_budget_baseline_and_unit(plans: dict[str, Plan]) -> None:
    ax = plans["module"].plot()
    assert ax.get_ylabel().startswith("device memory (")
    legend = ax.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    for part in ("parameters", "activations", "gradients", "nothing recomputed", "budget"):
        assert any(part in label for label in labels), labels
    assert {"forward", "backward"} <= {text.get_text() for text in ax.texts}


def test_lines_follow_the_style(plans: dict[str, Plan]) -> None:
    with mpl.rc_context({"text.color": "#eeeeee"}):
        ax = plans["module"].plot()
    assert "#eeeeee" in [line.get_color() for line in ax.lines]


def test_graphs_without_times_are_drawn_by_instruction() -> None:
    graph = Graph(
        [Tensor("x", 8, TensorKind.INPUT), Tensor("a", 8)],
        [Operator("f", (0,), (1,), 0.0)],
        outputs=[1],
    )
    plan = memopt.plan(graph, strategy="store-all")
    assert plan.plot("memory").get_xlabel() == "instruction"
    for kind in ("schedule", "timeline"):
        plan.plot(kind)


def test_unknown_plot(plans: dict[str, Plan]) -> None:
    with pytest.raises(ValueError, match="memory, schedule, timeline"):
        plans["chain"].plot("pie")


@pytest.mark.parametrize("kind", KINDS)
def test_without_matplotlib_the_extra_is_named(
    plans: dict[str, Plan], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plans["module"].plot(kind)


def test_groups_of_modules() -> None:
    paths = ["", "stem", *[f"layers.{i}.{name}" for i in range(4) for name in ("attn", "mlp")]]
    assert depth_for(paths, 3) == 1
    assert depth_for(paths, 6) == 2
    assert depth_for(paths, 99) == 3
    assert group_of("layers.3.attn", 2) == "layers.3"
    assert group_of("", 2) == "(model)"


def test_stage_runs_join_neighbours() -> None:
    steps = [ChainStep(Move.FORWARD_CHECKPOINT, 1), ChainStep(Move.FORWARD_NO_SAVE, 2)]
    steps += [ChainStep(Move.FORWARD_ALL, stage) for stage in (3, 2, 1, 4)]
    assert stage_runs(steps) == ((1, 2, 2), (3, 4, 1))

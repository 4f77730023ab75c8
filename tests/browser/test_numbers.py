"""Every figure that a page shows is the plan's, read back from the page in a browser."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.comparison import Comparison
from memopt.models.budget import format_bytes
from memopt.programs.lifetimes import lifetimes
from memopt.programs.replay import replay
from memopt.report.memory_profile import LAYERS, program_profile
from memopt.report.texts import format_seconds
from memopt.report.work import recomputed
from tests.browser.reading import Open, opened, shown, step_in
from tests.plan.tiny import make, profiled
from tests.report.cases import random_plan

pytestmark = pytest.mark.browser


def test_every_tile_is_a_figure_of_the_opened_plan(page: Any, comparison: Comparison) -> None:
    plan = opened(page, comparison)
    assert shown(page, "never moves") == plan.resident_bytes
    assert shown(page, "without memopt") == plan.baseline.peak_bytes
    assert shown(page, "bound") == plan.lower_bound_s
    runs = [run.op for _, run in plan.program.computes]
    assert shown(page, "recomputed") == len(runs) - len(set(runs))
    tiles = page.inner_text("#tiles")
    assert format_bytes(plan.peak_bytes) in tiles
    assert format_seconds(plan.step_time_s) in tiles


def test_slider_opens_every_plan_of_a_curve(page: Any, comparison: Comparison) -> None:
    page.select_option("#choice", "rotor")
    last = int(page.get_attribute("#slider", "max"))
    cells = {(c.peak_bytes, c.step_time_s) for c in comparison.cells if c.strategy == "rotor"}
    assert last == len(cells) - 1 > 1
    page.focus("#slider")
    page.keyboard.press("Home")
    peaks = []
    for _ in range(last + 1):
        plan = opened(page, comparison)
        peaks.append(plan.peak_bytes)
        assert format_bytes(plan.peak_bytes) in page.inner_text("#slider-text")
        assert page.get_attribute("#slider", "aria-valuetext").startswith("rotor: peak")
        step = step_in(page)
        timeline = replay(plan.graph, plan.program, plan.device)
        steps = [m for m, code in enumerate(step["codes"]) if code != -1]
        positions = plan.program.steps
        assert [step["total"][m] for m in steps] == [timeline.step_bytes[p] for p in positions]
        assert [step["start"][m] for m in steps] == [timeline.start_s[p] for p in positions]
        assert step["total"][step["peak"]] == plan.peak_bytes
        assert shown(page, "moment") == plan.peak_bytes
        page.keyboard.press("ArrowRight")
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.parametrize("seed", range(6))
def test_stack_is_the_memory_plot(seed: int, tmp_path: Path, open_page: Open) -> None:
    """By kind, layer for layer; by module, the same sums; drawn up to the same height."""
    plan = random_plan(seed)
    plan.report(tmp_path / "p.html", points=0)
    page = open_page(tmp_path / "p.html")
    profile = program_profile(plan.graph, plan.program, plan.device)
    positions = plan.program.steps
    step = step_in(page)
    steps = [m for m, code in enumerate(step["codes"]) if code != -1]
    assert [name for name, _ in step["layers"]] == list(LAYERS)
    for name, values in step["layers"]:
        assert [values[m] for m in steps] == [profile.layers[name][p] for p in positions]
    page.check("input[value=module]")
    by_module = step_in(page)
    sums = [sum(column) for column in zip(*(v for _, v in by_module["layers"]), strict=True)]
    assert sums == step["total"]
    unit = page.evaluate("() => memoptReport.data.units.memory.size")
    assert by_module["drawn"][:-1] == pytest.approx([total / unit for total in step["total"]])


@pytest.mark.parametrize("seed", range(6))
def test_next_readers_are_the_lifetimes(seed: int, tmp_path: Path, open_page: Open) -> None:
    """What the page says a tensor is kept for is the next Compute that reads its lifetime."""
    plan = random_plan(seed)
    plan.report(tmp_path / "p.html", points=0)
    page = open_page(tmp_path / "p.html")
    found = page.evaluate(
        """() => {
          const step = memoptReport.explorer.now, rows = [];
          for (let i = 0; i < step.lives.tensor.length; i++) {
            const readers = [];
            let at = nextReader(step, i, step.lives.begin[i] + 1);
            while (at !== null) { readers.push(at); at = nextReader(step, i, at + 1); }
            rows.push([step.lives.tensor[i], readers]);
          }
          return [rows, [...step.codes]];
        }"""
    )
    rows, codes = found
    runs = dict(plan.program.computes)
    moments = [m for m, code in enumerate(codes) if code != -1]
    at = dict(zip(plan.program.steps, moments, strict=True))
    expected = [
        [x.tensor, [at[p] for p in x.readers if p in runs]]
        for x in lifetimes(plan.graph, plan.program).device
    ]
    assert rows == expected


def test_next_steps_are_the_curve(page: Any, comparison: Comparison) -> None:
    page.select_option("#choice", "rotor")
    plan = opened(page, comparison)
    cells = [cell for cell in comparison.cells if cell.plan is not None]
    less = [
        ((cell.step_time_s - plan.step_time_s) / (plan.peak_bytes - cell.peak_bytes), cell)
        for cell in cells
        if cell.peak_bytes is not None
        and cell.step_time_s is not None
        and cell.peak_bytes < plan.peak_bytes
    ]
    _, cheapest = min(less, key=lambda row: row[0])
    button = page.locator("#next button").first
    assert cheapest.peak_bytes is not None
    assert int(button.get_attribute("data-bytes")) == cheapest.peak_bytes - plan.peak_bytes
    button.click()
    assert shown(page, "peak memory") == cheapest.peak_bytes


def test_a_measured_step_is_drawn(tmp_path: Path, open_page: Open) -> None:
    model, inputs, loss = make("mlp")
    plan = memopt.plan(profiled(make("mlp")), budget="min", progress=False)
    made = plan.report(tmp_path / "p.html", model, inputs, loss_fn=loss, points=0)
    check = made.subject.check
    assert check is not None
    page = open_page(tmp_path / "p.html")
    values = page.eval_on_selector_all(
        "#check td[data-value]", "all => all.map((one) => Number(one.dataset.value))"
    )
    assert values == [
        check.predicted_peak_bytes,
        check.measured_peak_bytes,
        check.predicted_time_s,
        check.measured_time_s,
    ]
    lanes = page.evaluate(
        "() => [...memoptReport.explorer.plots.model('streams').left[0]"
        ".major_label_overrides.values()]"
    )
    assert lanes == ["compute", "measured compute"]
    measured = made.subject.measured
    assert measured is not None
    drawn = page.evaluate(
        """() => Object.keys(memoptReport.data.colors.spans).flatMap((kind) => {
          const { top } = memoptReport.explorer.plots.model(`spans ${kind}`).data;
          return [...top].filter((y) => y > 0.5);
        }).length"""
    )
    names = {operator.name for operator in plan.graph.operators}
    assert drawn == sum(span.name in names for span in measured.spans) > 40


def test_figures_are_written_as_in_python(page: Any) -> None:
    sizes = [0, 1, 1023, 1024, 1536, 5 * 2**20 + 7, 3 * 2**30, 7 * 2**40]
    written = page.evaluate("all => all.map(memoptReport.formatBytes)", sizes)
    assert written == [format_bytes(size) for size in sizes]
    times = [0.0, 1.5e-6, 9.994e-4, 1e-3, 0.25, 1.0, 61.237]
    written = page.evaluate("all => all.map(memoptReport.formatSeconds)", times)
    assert written == [format_seconds(time) for time in times]


def test_a_step_without_times_counts_instructions(tmp_path: Path, open_page: Open) -> None:
    graph = random_plan(1).graph
    operators = [replace(x, time_s=0.0, implementations=()) for x in graph.operators]
    given = {one.name: getattr(graph, one.name) for one in fields(graph)}
    timeless = memopt.Graph(**{**given, "operators": operators})
    plan = memopt.plan(timeless, strategy="store-all", progress=False)
    assert plan.step_time_s == 0
    plan.report(tmp_path / "p.html", points=0)
    page = open_page(tmp_path / "p.html")
    step = step_in(page)
    assert max(step["total"]) == plan.peak_bytes
    page.locator("#step-plot").scroll_into_view_if_needed()
    box = page.locator("#step-plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
    page.wait_for_timeout(100)
    assert 0 < int(page.get_attribute("#step-plot", "aria-valuenow")) < len(step["codes"]) - 1


def test_recomputation_is_named_with_its_time(page: Any, comparison: Comparison) -> None:
    page.select_option("#choice", "rotor")
    page.focus("#slider")
    page.keyboard.press("Home")
    plan = opened(page, comparison)
    run: dict[int, list[int]] = {}
    for position, one in plan.program.computes:
        run.setdefault(one.op, []).append(position)
    again = page.evaluate(
        """() => {
          const step = memoptReport.explorer.now;
          return step.graph.tensors.producer.map((op, t) => op < 0 ? null : runsAgain(step, t));
        }"""
    )
    for tensor, found in enumerate(again):
        producer = plan.graph.producer.get(tensor)
        if producer is None:
            assert found is None
            continue
        times = len(run.get(producer, ())) - 1
        assert found["count"] == max(0, times)
        assert found["seconds"] == pytest.approx(times * plan.graph.operators[producer].time_s)
    page.focus("#step-plot")
    page.keyboard.press("p")
    whole = page.evaluate(
        "() => { const s = memoptReport.explorer.now; return [...s.lives.tensor.keys()].map("
        "(i) => whyThere(s, i, s.lives.begin[i])); }"
    )
    assert any("recomputed 1× for " in why for why in whole)


def test_the_table_of_modules_shows_its_data(page: Any, comparison: Comparison) -> None:
    page.select_option("#choice", "rotor")
    page.focus("#slider")
    page.keyboard.press("Home")
    plan = opened(page, comparison)
    cells = page.eval_on_selector_all(
        "#modules tr",
        "all => all.map((row) => [row.querySelector('th').textContent, "
        "...[...row.querySelectorAll('td')].map((one) => Number(one.dataset.value))])",
    )
    _, parameters, _, at_peak, runs, seconds, moved = zip(*cells, strict=True)
    profile = program_profile(plan.graph, plan.program, plan.device)
    assert sum(parameters) == profile.layers["parameters"][0]
    assert sum(at_peak) == plan.peak_bytes - plan.resident_bytes
    extras = recomputed(plan.graph, plan.program, most_groups=40)
    shown_runs = {row[0]: (row[4], row[5]) for row in cells if row[4]}
    assert shown_runs == {x.module: (x.count, pytest.approx(x.time_s)) for x in extras}
    assert sum(runs) > 0 < sum(seconds)
    assert sum(moved) == 0

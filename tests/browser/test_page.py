"""The page as a reader has it: slider, pointer, keyboard, colours; nothing runs unasked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.comparison import Comparison
from memopt.api.plan import Plan
from memopt.models.budget import format_bytes
from memopt.programs.lifetimes import lifetimes
from memopt.programs.replay import replay
from memopt.report.memory_profile import LAYERS, program_profile
from memopt.report.texts import format_seconds
from tests.plan.tiny import make, profiled
from tests.report.cases import EVIL, random_plan, renamed

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Of a module, so that the page has shapes."""
    return memopt.curve(
        profiled(make("mlp")), strategies=["store-all", "rotor"], points=4, progress=False
    )


@pytest.fixture
def page(comparison: Comparison, tmp_path: Path, open_page: Open) -> Any:
    comparison.report(tmp_path / "page.html")
    return open_page(tmp_path / "page.html")


def shown(page: Any, name: str) -> float:
    """A tile's whole figure."""
    return float(page.get_attribute(f"[data-figure='{name}']", "data-value"))


def opened(page: Any, comparison: Comparison) -> Plan:
    """The plan that the page is about, by its figures."""
    figures = shown(page, "peak memory"), shown(page, "step time")
    found = [
        cell.plan
        for cell in comparison.cells
        if cell.plan is not None and (cell.plan.peak_bytes, cell.plan.step_time_s) == figures
    ]
    assert found
    return found[0]


def step_in(page: Any) -> dict[str, Any]:
    """The step that the page draws, as its script worked it out."""
    found: dict[str, Any] = page.evaluate(
        """() => {
          const { data, explorer } = memoptReport, step = explorer.now;
          const plots = explorer.plots;
          return {
            codes: [...step.codes], start: [...step.start], total: [...step.total],
            peak: step.program.peak, layers: explorer.layers().map((x) => [x.name, [...x.bytes]]),
            drawn: [...plots.model("stack").data.get?.("l10") ?? plots.model("stack").data.l10],
          };
        }"""
    )
    return found


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


def test_pointing_names_what_is_in_memory(page: Any, comparison: Comparison) -> None:
    page.select_option("#choice", "rotor")
    page.focus("#slider")
    page.keyboard.press("Home")
    plan = opened(page, comparison)
    timeline = replay(plan.graph, plan.program, plan.device)
    page.locator("#step-plot").scroll_into_view_if_needed()
    box = page.locator("#step-plot").bounding_box()
    seen = set()
    for number in range(12):
        page.mouse.move(box["x"] + 120 + (box["width"] - 170) * number / 11, box["y"] + 200)
        page.wait_for_timeout(60)
        moment = int(page.get_attribute("#step-plot", "aria-valuenow"))
        seen.add(moment)
        total = shown(page, "moment")
        assert total in timeline.step_bytes
        listed = page.eval_on_selector_all(
            "#moment-memory li b", "all => all.map((one) => Number(one.dataset.value))"
        )
        assert sum(listed) == total
    assert len(seen) > 8
    texts = page.inner_text("#moment-memory")
    assert "float32 [" in texts
    assert "resident: there during the whole step" in texts


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


def test_click_pins_an_operator_with_what_it_reads_and_writes(
    page: Any, comparison: Comparison
) -> None:
    plan = opened(page, comparison)
    page.locator("#step-plot").scroll_into_view_if_needed()
    box = page.locator("#step-plot").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 460)
    page.wait_for_selector("#moment-operator:not([hidden])")
    assert page.inner_text("#moment-kind").endswith("pinned")
    what = page.inner_text("#moment-name")
    (operator,) = [one for one in plan.graph.operators if f"{one.module}: {one.name}" == what]
    for name, tensors in (("reads", operator.reads), ("writes", operator.writes)):
        listed = page.eval_on_selector_all(
            f"#operator-{name} li", "all => all.map((one) => Number(one.dataset.tensor))"
        )
        assert listed == list(dict.fromkeys(tensors))
    pinned = page.get_attribute("#step-plot", "aria-valuenow")
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 200)
    page.wait_for_timeout(100)
    assert page.get_attribute("#step-plot", "aria-valuenow") == pinned


def test_keyboard_goes_over_moments(page: Any) -> None:
    page.focus("#step-plot")
    last = int(page.get_attribute("#step-plot", "aria-valuemax"))

    def now() -> int:
        return int(page.get_attribute("#step-plot", "aria-valuenow"))

    page.keyboard.press("Home")
    assert now() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert now() == 1
    assert not page.locator("#moment-operator").is_hidden()
    page.keyboard.press("PageDown")
    assert now() == 26
    page.keyboard.press("End")
    assert now() == last
    page.keyboard.press("p")
    assert now() == page.evaluate("() => memoptReport.explorer.now.program.peak")
    page.keyboard.press("Escape")
    assert page.locator("#moment-operator").is_hidden()
    assert format_bytes(shown(page, "moment")) in page.get_attribute("#step-plot", "aria-valuetext")


def test_tab_reaches_every_control(page: Any) -> None:
    reached = []
    page.focus("body")
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    assert {"theme", "slider", "choice", "step-plot"} <= set(reached)


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


def test_a_point_of_the_curve_opens_its_plan(page: Any, comparison: Comparison) -> None:
    page.locator("#curve-plot").scroll_into_view_if_needed()
    smallest = min(
        (cell for cell in comparison.cells if cell.plan), key=lambda cell: cell.peak_bytes or 0
    )
    assert smallest.step_time_s is not None
    assert smallest.peak_bytes is not None
    spot = page.evaluate(
        """([bytes, seconds]) => {
          const { explorer } = memoptReport, { units } = explorer.plots;
          const model = explorer.plots.model("curve");
          const view = Bokeh.index.find_one(model);
          const box = view.canvas_view.el.getBoundingClientRect();
          return [box.x + view.frame.x_scale.compute(bytes / units.memory.size),
                  box.y + view.frame.y_scale.compute(seconds * units.time.size)];
        }""",
        [smallest.peak_bytes, smallest.step_time_s],
    )
    page.mouse.click(*spot)
    page.wait_for_timeout(200)
    assert shown(page, "peak memory") == smallest.peak_bytes


def test_dark_and_light(comparison: Comparison, tmp_path: Path, open_page: Open) -> None:
    comparison.report(tmp_path / "page.html")
    colors: dict[str, tuple[str, str]] = {}

    def both(page: Any) -> tuple[str, str]:
        background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        axis = page.evaluate(
            "() => memoptReport.explorer.plots.model('memory').left[0].major_label_text_color"
        )
        return background, str(axis)

    for scheme in ("light", "dark"):
        page = open_page(tmp_path / "page.html", color_scheme=scheme)
        colors[scheme] = both(page)
        page.click("#theme")
        colors[f"switched from {scheme}"] = both(page)
    assert colors["light"] == colors["switched from dark"]
    assert colors["dark"] == colors["switched from light"]
    assert colors["light"][0] != colors["dark"][0]
    assert colors["light"][1] != colors["dark"][1]


def test_names_cannot_run(tmp_path: Path, open_page: Open) -> None:
    plan = renamed(random_plan(2))
    plan.save(tmp_path / "p.json")
    memopt.load(tmp_path / "p.json").report(tmp_path / "p.html", points=0, title=EVIL[0])
    page = open_page(tmp_path / "p.html")
    assert page.title() == f"{EVIL[0]}: memory and time"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 4
    assert EVIL[0] in page.inner_text("h1")
    page.check("input[value=module]")
    page.focus("#step-plot")
    page.keyboard.press("Home")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    assert "onerror" in page.inner_text("main")


def test_the_policy_stops_what_gets_in_anyway(
    comparison: Comparison, tmp_path: Path, browser: Any
) -> None:
    """Script and pictures that somebody puts into the file neither run nor are fetched."""
    text = comparison.report().html
    evil = "<script>document.title='owned'</script><img src='https://example.org/x.png'>"
    (tmp_path / "p.html").write_text(text.replace("<main>", f"<main>{evil}"), encoding="utf-8")
    page = browser.new_page()
    fetched: list[str] = []
    page.on("requestfinished", lambda request: fetched.append(request.url))
    page.goto((tmp_path / "p.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.title() == "Sequential: memory and time"
    assert all(url.startswith("file:") for url in fetched)
    page.close()


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
    fields = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    timeless = memopt.Graph(**{**fields, "operators": operators})
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

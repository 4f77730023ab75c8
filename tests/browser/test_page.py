"""The page as a reader has it: slider, pointer, keyboard, colours; nothing runs unasked."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.comparison import Comparison
from memopt.models.budget import format_bytes
from memopt.programs.replay import replay
from tests.browser.reading import Open, opened, shown
from tests.report.cases import EVIL, random_plan, renamed

pytestmark = pytest.mark.browser

WATCH = """() => {
  globalThis.hovers = [];
  document.getElementById("step-plot").addEventListener("pointermove", () => {
    const begin = performance.now();
    requestAnimationFrame(() => setTimeout(() => hovers.push(performance.now() - begin)));
  }, { capture: true });
}"""


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


def test_hovers_are_answered_within_200_ms(page: Any) -> None:
    """The median of 20, from the pointer's event to the end of the frame."""
    page.evaluate(WATCH)
    page.locator("#step-plot").scroll_into_view_if_needed()
    box = page.locator("#step-plot").bounding_box()
    for number in range(20):
        page.mouse.move(box["x"] + 120 + 20 * number, box["y"] + 200)
        page.wait_for_timeout(50)
    times = page.evaluate("() => hovers")
    assert len(times) >= 10
    assert statistics.median(times) < 200


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


def test_a_notebook_shows_it_in_a_frame(
    comparison: Comparison, tmp_path: Path, browser: Any
) -> None:
    """Jupyter puts `_repr_html_` into its own page; the frame has no rights there."""
    shown = comparison.report()._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<title>notebook</title>{shown}", encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(timeout=60_000)
    assert "plan 4 of 4" in frame.locator("#slider-text").inner_text()
    assert page.title() == "notebook"
    page.close()

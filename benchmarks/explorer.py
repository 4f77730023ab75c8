"""Reports of four models on an H100, their size and speed: docs/results/explorer.md.

Estimated, with 20 budgets per strategy. Every page is opened in headless Chromium (see `make
test-browser`), its slider is moved over plans and the pointer over 100 moments of the step; a hover
is the time from the pointer's event to the end of the frame in which the page shows the moment.
Fails where a page is above 10 MB or the slowest hover above 200 ms.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.runner import Benchmark, Line
from benchmarks.shapes import llama
from tests.browser.chromium import chromium
from tests.zoo import get

DEVICE = "H100"
MOST_BYTES, MOST_MS = 10_000_000, 200.0
HOVERS = 100
MODELS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "gpt2": ("GPT-2, 12 layers, batch 8 × 512", 8, ("store-all", "sequential", "rotor")),
    "resnet50": ("ResNet-50, batch 64", 64, ("store-all", "rotor", "dynprog")),
    "unet": ("U-Net, batch 4", 4, ("store-all", "rotor", "dynprog")),
    "llama": ("Llama 8B, batch 4 × 2,048", 4, ("store-all", "sequential", "rotor")),
}
"""Model → what it is, its batch, and the strategies compared."""


def _made(name: str, batch: int) -> tuple[Any, Any, str]:
    """Build (model, inputs, optimizer): a family of the zoo in the paper's size, or Llama 3 8B in
    bfloat16."""
    with torch.device("meta"):
        if name == "llama":
            tokens = torch.zeros(batch, 2048, dtype=torch.long)
            inputs = {"input_ids": tokens, "labels": tokens}
            return llama("llama-3-8b").to(torch.bfloat16), inputs, "adamw-8bit"
        model = get(name).build("paper")
    return model, get(name).inputs("paper", batch=batch), "adamw"


WATCH = """() => {
  globalThis.hovers = [];
  document.getElementById("step-plot").addEventListener("pointermove", () => {
    const begin = performance.now();
    requestAnimationFrame(() => setTimeout(() => hovers.push(performance.now() - begin)));
  }, { capture: true });
}"""
OPEN_PLANS = """async () => {
  const slider = document.getElementById("slider"), times = [];
  for (let at = 0; at <= Number(slider.max); at++) {
    slider.value = String(at);
    const begin = performance.now();
    slider.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - begin);
  }
  return times;
}"""


def driven(browser: Any, path: Path) -> tuple[float, float, tuple[float, ...], int]:
    """Give (seconds to open, slowest plan opened in ms, hovers in ms, moments of the largest
    plan)."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    begin = time.perf_counter()
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    opens_s = time.perf_counter() - begin
    plans_ms = page.evaluate(OPEN_PLANS)
    page.evaluate(WATCH)
    plot = page.locator("#step-plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    seen = set()
    for number in range(HOVERS):
        across = 100 + (box["width"] - 130) * number / (HOVERS - 1)
        page.mouse.move(box["x"] + across, box["y"] + 200 + number % 7)
        while page.evaluate("() => hovers.length") <= number:
            time.sleep(0.002)
        seen.add(page.get_attribute("#step-plot", "aria-valuenow"))
    if len(seen) < HOVERS / 4:
        raise AssertionError(f"{path}: {HOVERS} hovers showed {len(seen)} moments")
    moments = page.evaluate(
        "() => Math.max(...memoptReport.data.programs.map((one) => one.moments.length))"
    )
    hovers = tuple(page.evaluate("() => hovers"))
    page.close()
    return opens_s, max(plans_ms), hovers, moments


def _measured(given: Any, name: str) -> list[Line]:
    from playwright.sync_api import sync_playwright

    title, batch, strategies = MODELS[name]
    model, inputs, optimizer = _made(name, batch)
    how = {"device": DEVICE, "mode": "estimate", "optimizer": optimizer, "progress": False}
    curve = memopt.curve(model, inputs, strategies=strategies, points=given.points, **how)
    given.pages.mkdir(parents=True, exist_ok=True)
    path, begin = given.pages / f"{name}.html", time.process_time()
    page = curve.report(path, title=f"{title} on an {DEVICE}")
    writing_s = time.process_time() - begin
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        opens_s, opening_ms, hovers, moments = driven(browser, path)
        browser.close()
    plans = sum(cell.plan is not None for cell in page.subject.comparison.cells)
    operators, size = len(page.subject.opened.graph.operators), path.stat().st_size
    slowest = max(hovers)
    line = (
        f"{title} | {operators:,} | {moments:,} | {plans} | {size / 1e6:.1f} | {writing_s:.1f} | "
        f"{opens_s:.1f} | {opening_ms:.0f} | {statistics.median(hovers):.0f}, {slowest:.0f}"
    )
    wrong = f"too slow or too large: {title}" * (slowest > MOST_MS or size > MOST_BYTES)
    return [Line(line, wrong)]


BENCHMARK = Benchmark(
    cases={name: (name,) for name in MODELS},
    measure=_measured,
    head="model | operators | moments of a plan, at most | plans | file (MB) | writing (s CPU) | "
    "opens (s) | another plan, slowest (ms) | hover: median, slowest (ms)",
    selects=("pages",),
    options={"points": 20, "pages": Path("out/explorer")},
)

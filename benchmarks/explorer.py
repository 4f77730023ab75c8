"""Reports of four models on an H100, their size and speed: docs/results/explorer.md.

    python -m benchmarks.explorer [MODEL ...] [--points 20] [--pages FOLDER] [--out FILE.md]

Estimated, with 20 budgets per strategy. Every page is opened in headless Chromium (see `make
test-browser`), its slider is moved over plans and the pointer over 100 moments of the step; a hover
is the time from the pointer's event to the end of the frame in which the page shows the moment.
Fails where a page is above 10 MB or the slowest hover above 200 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.llamas import llama
from tests.browser.chromium import chromium
from tests.zoo import get, torchvision_shim  # noqa: F401 (before transformers)

DEVICE = "H100"
MOST_BYTES, MOST_MS = 10_000_000, 200.0
HOVERS = 100

Made = tuple[Any, Any, str | None]
"""(model, inputs, optimizer)."""


def family(name: str, batch: int) -> Callable[[], Made]:
    """A family of the zoo in the paper's size."""

    def make() -> Made:
        one = get(name)
        with torch.device("meta"):
            model = one.build("paper")
        return model, one.inputs("paper", batch=batch), "adamw"

    return make


def llama_8b() -> Made:
    """The shape of Llama 3 8B in bfloat16: 32 layers, 8 key-value heads; 2,048 tokens."""
    with torch.device("meta"):
        model = llama("llama-3-8b").to(torch.bfloat16)
        tokens = torch.zeros(4, 2048, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}, "adamw-8bit"


MODELS: dict[str, tuple[str, Callable[[], Made], tuple[str, ...]]] = {
    "gpt2": (
        "GPT-2, 12 layers, batch 8 × 512",
        family("gpt2", 8),
        ("store-all", "sequential", "rotor"),
    ),
    "resnet50": (
        "ResNet-50, batch 64",
        family("resnet50", 64),
        ("store-all", "rotor", "dynprog"),
    ),
    "unet": ("U-Net, batch 4", family("unet", 4), ("store-all", "rotor", "dynprog")),
    "llama": ("Llama 8B, batch 4 × 2,048", llama_8b, ("store-all", "sequential", "rotor")),
}


@dataclass(frozen=True)
class Row:
    """What a page is and how quick: bytes, seconds, milliseconds."""

    title: str
    operators: int
    moments: int
    plans: int
    size_bytes: int
    planning_s: float
    writing_s: float
    opens_s: float
    opening_plan_ms: float
    hover_ms: tuple[float, ...]


def made(name: str, points: int, folder: Path) -> tuple[Any, Any, float, float, Path]:
    """Plans a model and writes its page."""
    title, make, strategies = MODELS[name]
    model, inputs, optimizer = make()
    begin = time.process_time()
    curve = memopt.curve(
        model,
        inputs,
        strategies=strategies,
        points=points,
        device=DEVICE,
        mode="estimate",
        optimizer=optimizer,
        progress=False,
    )
    planned = time.process_time()
    path = folder / f"{name}.html"
    page = curve.report(path, title=f"{title} on an {DEVICE}")
    written = time.process_time()
    return page.subject.opened, page, planned - begin, written - planned, path


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
    """(seconds to open, slowest plan opened in ms, hovers in ms, moments of the largest plan)."""
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


def measured(name: str, points: int, folder: Path, browser: Any) -> Row:
    """One row of the table."""
    plan, page, planning_s, writing_s, path = made(name, points, folder)
    opens_s, opening_ms, hovers, moments = driven(browser, path)
    cells = [cell for cell in page.subject.comparison.cells if cell.plan is not None]
    return Row(
        MODELS[name][0],
        len(plan.graph.operators),
        moments,
        len(cells),
        path.stat().st_size,
        planning_s,
        writing_s,
        opens_s,
        opening_ms,
        hovers,
    )


def table(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [
        "| model | operators | moments of a plan, at most | plans | file (MB) | writing (s CPU) | "
        "opens (s) | another plan, slowest (ms) | hover: median, slowest (ms) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.title} | {row.operators:,} | {row.moments:,} | {row.plans} | "
        f"{row.size_bytes / 1e6:.1f} | {row.writing_s:.1f} | {row.opens_s:.1f} | "
        f"{row.opening_plan_ms:.0f} | "
        f"{statistics.median(row.hover_ms):.0f}, {max(row.hover_ms):.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """The exit status: 1 where a page is too large or too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all if none is named")
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--pages", type=Path, help="keep the pages here")
    parser.add_argument("--out", type=Path, help="write the table here, after the page's own text")
    chosen = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = chosen.pages or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        rows = []
        for name in chosen.models or MODELS:
            rows.append(measured(name, chosen.points, folder, browser))
            print(table(rows).splitlines()[-1], flush=True)
        browser.close()
    text = table(rows)
    print(text)
    if chosen.out is not None:
        before = chosen.out.read_text(encoding="utf-8").partition("\n| model |")[0]
        chosen.out.write_text(f"{before}\n{text}\n", encoding="utf-8")
    late = [row.title for row in rows if max(row.hover_ms) > MOST_MS]
    large = [row.title for row in rows if row.size_bytes > MOST_BYTES]
    for title in (*late, *large):
        print(f"too slow or too large: {title}", file=sys.stderr)
    return int(bool(late or large))


if __name__ == "__main__":
    sys.exit(main())

"""Draw the pictures of docs/gallery: python docs/make_gallery.py, from the repository's root.

Everything is estimated for an A100 (the report for an H100), so the pictures are the same on every
machine. The report's pictures need a browser: see `make test-browser`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import memopt
from memopt.api.plan import Plan
from memopt.models.instances import rotor_toy
from memopt.report.style import new_figure
from memopt.strategies.offload.dynprog import DynProg
from tests.zoo import get

GALLERY = ROOT / "docs" / "gallery"
DOTS_PER_INCH = 110
DEVICE = "A100"
RECOMPUTING = ("store-all", "sequential", "revolve", "rotor", "rotor-optimal", "rotor-free")


def planned(name: str, strategy: str | memopt.Strategy, share: float, batch: int) -> Plan:
    """A plan between the smallest budget of the strategy (share 0) and the baseline (share 1)."""
    family = get(name)
    with torch.device("meta"):
        model = family.build("paper")
    inputs = family.inputs("paper", batch=batch)
    options = {"strategy": strategy, "device": DEVICE, "mode": "estimate", "progress": False}
    least = memopt.plan(model, inputs, budget="min", **options)
    assert least.budget is not None
    budget = least.budget + int(share * (least.baseline.peak_bytes - least.budget))
    return memopt.plan(model, inputs, budget=budget, **options)


def compared(name: str, batch: int) -> memopt.Comparison:
    """The strategies that recompute, on a model, at the default budgets."""
    family = get(name)
    with torch.device("meta"):
        model = family.build("paper")
    return memopt.compare(
        model,
        family.inputs("paper", batch=batch),
        strategies=RECOMPUTING,
        device=DEVICE,
        mode="estimate",
        progress=False,
    )


def draw(name: str, plot: Callable[[Axes], Axes], height_inches: float = 3.4) -> None:
    """One picture; `plot` draws on the Axes it is given."""
    figure, axes = new_figure(height_inches)
    plot(axes)
    path = GALLERY / f"{name}.png"
    figure.savefig(path, dpi=DOTS_PER_INCH)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


def draw_comparison() -> None:
    """Strategies against each other, on a light and on a dark page."""
    table = compared("resnet50", batch=64)
    draw("comparison", table.plot)
    with style.context("dark_background"):
        draw("comparison-dark", table.plot)


def draw_report() -> None:
    """A report, which is a page of the documentation, and pictures of it from a browser."""
    from playwright.sync_api import sync_playwright

    from tests.browser.chromium import chromium

    folder = ROOT / "docs" / "explorer"
    folder.mkdir(exist_ok=True)
    family = get("gpt2")
    with torch.device("meta"):
        model = family.build("paper")
    table = memopt.curve(
        model,
        family.inputs("paper", batch=8),
        strategies=["store-all", "sequential", "rotor"],
        points=8,
        device="H100",
        mode="estimate",
        optimizer="adamw",
        progress=False,
    )
    path = folder / "gpt2.html"
    table.report(path, title="GPT-2, 12 layers, batch 8 × 512, on an H100")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for name, scheme, stacked in (
            ("report", "light", "kind"),
            ("report-dark", "dark", "module"),
        ):
            page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.focus("#slider")
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
            page.check(f"input[value={stacked}]")
            page.wait_for_timeout(500)
            picture = GALLERY / f"{name}.png"
            page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1400, "height": 1500},
                            full_page=True)  # fmt: skip
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1024:.0f} KiB")
        browser.close()


def main() -> None:
    GALLERY.mkdir(exist_ok=True)
    gpt2 = planned("gpt2", "rotor", 0.15, batch=8)
    draw("memory", lambda ax: gpt2.plot("memory", ax))
    draw("schedule", lambda ax: gpt2.plot("schedule", ax), 3.8)
    with style.context("dark_background"):
        draw("memory-dark", lambda ax: gpt2.plot("memory", ax))
    resnet = planned("resnet50", DynProg(), 0.3, batch=64)
    draw("offload-memory", lambda ax: resnet.plot("memory", ax))
    draw("timeline", lambda ax: resnet.plot("timeline", ax), 2.2)
    draw_comparison()
    draw_report()
    toy = memopt.plan(rotor_toy(), budget="min")
    draw("chain-schedule", lambda ax: toy.plot("schedule", ax), 4.0)
    draw("chain-memory", lambda ax: toy.plot("memory", ax))


if __name__ == "__main__":
    main()

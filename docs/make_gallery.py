"""Draw the pictures of docs/gallery: python docs/make_gallery.py, from the repository's root.

Everything is estimated for an A100, so the pictures are the same on every machine.
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
    toy = memopt.plan(rotor_toy(), budget="min")
    draw("chain-schedule", lambda ax: toy.plot("schedule", ax), 4.0)
    draw("chain-memory", lambda ax: toy.plot("memory", ax))


if __name__ == "__main__":
    main()

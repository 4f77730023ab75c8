"""Stage menus beside plain Rotor on the zoo's models (estimated for an H100, batch 32).

    python -m benchmarks.monet_menus [--folder FOLDER] [--out FILE] [--only TABLE] [model ...]

Graphs are captured once, with their implementations, and kept in FOLDER, and so are finished
rows. "NAME+loss" is a model with its loss inside, so that the logits are the plan's to free. The
bound is what no plan with these implementations and without transfers beats.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.kept import Kept
from benchmarks.losses import WithLoss
from memopt.implementations import with_implementations
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies.monet.rotor_menus import RotorMenus
from tests.zoo import FAMILIES, get
from tests.zoo.family import Family
from tests.zoo.language import make_gpt2

DEVICE = "H100"
BATCH = 32
SHARES = (0.5, 0.35)
LIMIT_S = 60.0
LOSS = "+loss"
GPT2_80 = "gpt2_80"
HEAD = ("Rotor at {}", "menus", "of Rotor's", "bound", "s")


@dataclass(frozen=True)
class Table:
    """One table of the page: which models, by which implementations."""

    key: str
    title: str
    names: tuple[str, ...]
    exact: bool = True


TABLES = (
    Table("families", "Exact implementations", tuple(family.name for family in FAMILIES)),
    Table(
        "loss",
        "With the loss inside the step, exact implementations",
        tuple(name + LOSS for name in ("bert", "gpt2", "llama")),
    ),
    Table(
        "all",
        "All implementations, those that change rounding too",
        ("resnet50", "vit_b_16", "bert", *(name + LOSS for name in ("bert", "gpt2", "llama"))),
        exact=False,
    ),
    Table("deep", "Deep models, exact implementations", ("resnet152", "densenet201", GPT2_80)),
)


@dataclass(frozen=True)
class Cell:
    """One budget of a line. Overheads over the baseline's time; None: there is no plan."""

    peak_bytes: int
    """Of the baseline."""
    share: float
    rotor: float | None
    menus: float | None
    bound: float | None
    least_share: float | None
    """The smallest budget found, where there is no plan, as a share of the peak."""
    seconds: float


def family_of(name: str) -> Family:
    """The zoo's, or a GPT-2 of eighty layers."""
    if name != GPT2_80:
        return get(name)
    return replace(get("gpt2"), name=name, make=make_gpt2(0.1, {"n_layer": 80}))


def estimated_graph(
    name: str, folder: Path, exact: bool = True, device: Device | None = None
) -> Graph:
    """The graph of a model's step at its published size, read from `folder` if it is there; it is
    of one device (None: DEVICE)."""
    path = folder / f"{name}-b{BATCH}-{'exact' if exact else 'all'}.json"
    if path.exists():
        found = loads(path.read_bytes())
        if isinstance(found, Graph):
            return found
    family = family_of(name.removesuffix(LOSS))
    with torch.device("meta"):
        model = family.build("paper")
        if name.endswith(LOSS):
            model = WithLoss(model, family.loss)
    device = device or find_device(DEVICE)
    profiled = estimate_model(model, family.inputs("paper", batch=BATCH), device)
    graph = with_implementations(profiled, exact_only=exact, device=device).graph
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dumps(graph))
    return graph


def solved(graph: Graph, exact: bool) -> list[Cell]:
    """Plans at each of SHARES, judged."""
    base = replay(graph, store_all(graph))
    cells = []
    for share in SHARES:
        budget = int(share * base.peak_bytes)
        begin = time.perf_counter()
        solution = RotorMenus(exact_only=exact).solve(graph, budget, time_limit_s=LIMIT_S)
        seconds = time.perf_counter() - begin
        plain_s, found_s = solution.stats.get("rotor_s", math.inf), solution.time_s
        assert isinstance(plain_s, float)
        least, bound_s = solution.smallest_budget_bytes, solution.lower_bound_s
        if solution.program is not None:
            assert validate_and_replay(graph, solution.program, Budget(budget), None)[0] is None
            assert found_s is not None
            assert found_s <= plain_s
        cells.append(
            Cell(
                base.peak_bytes,
                share,
                None if plain_s == float("inf") else plain_s / base.time_s - 1,
                None if found_s is None else found_s / base.time_s - 1,
                None if bound_s is None else bound_s / base.time_s - 1,
                None if least is None else least / base.peak_bytes,
                seconds,
            )
        )
    return cells


def line(name: str, found: list[Cell]) -> str:
    """A model's line as Markdown."""
    cells = [name, f"{found[0].peak_bytes / 2**30:.2f}"]
    for cell in found:
        known = "" if cell.least_share is None else f" (from {cell.least_share:.2f})"
        ratio = ""
        if cell.menus is not None and cell.rotor is not None and cell.rotor > 0:
            ratio = f"{cell.menus / cell.rotor:.2f}" if cell.menus > 0 else "≤ 0"
        cells += [
            "none" if cell.rotor is None else f"{cell.rotor:+.1%}",
            f"none{known}" if cell.menus is None else f"{cell.menus:+.1%}",
            ratio,
            "" if cell.bound is None else f"{cell.bound:+.1%}",
            f"{cell.seconds:.0f}",
        ]
    return "| " + " | ".join(cells) + " |\n"


def page(kept: Kept[Cell]) -> str:
    """The tables of all rows that are there."""
    text = (
        "# Rotor and stage menus on the families\n\n"
        f"Time overhead at shares of the peak, batch {BATCH}, estimated for {DEVICE} "
        "(`python -m benchmarks.monet_menus`).\n"
        f"Time limit {LIMIT_S:g} s a plan. The bound is what no plan with these implementations "
        "and without transfers beats;\noverheads below zero: an implementation chosen is faster "
        "than PyTorch's own operator in the estimate.\n"
    )
    heads = ["model", "peak GiB", *(text.format(share) for share in SHARES for text in HEAD)]
    for table in TABLES:
        rows = [(name, kept.rows.get(f"{table.key} {name}")) for name in table.names]
        if not any(found for _, found in rows):
            continue
        text += f"\n## {table.title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
        text += "".join(line(name, found) for name, found in rows if found)
    return text


def main() -> None:
    """Print the tables, line by line, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-graphs"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=[table.key for table in TABLES])
    parser.add_argument("models", nargs="*", help="of the tables; those named are solved again")
    options = parser.parse_args()
    marks = {"limit_s": LIMIT_S, "shares": list(SHARES), "batch": BATCH}
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.folder / "menus.json", Cell, marks)
    for table in TABLES:
        for name in table.names:
            key = f"{table.key} {name}"
            wanted = name in options.models if options.models else key not in kept.rows
            if wanted and options.only in (None, table.key):
                graph = estimated_graph(name, options.folder, table.exact)
                kept.add(key, solved(graph, table.exact))
                sys.stdout.write(line(name, kept.rows[key]))
                sys.stdout.flush()
            if options.out is not None:
                options.out.write_text(page(kept))


if __name__ == "__main__":
    main()

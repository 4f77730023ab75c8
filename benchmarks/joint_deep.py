"""Joint plans of deep models of equal layers: planning time against depth (estimated).

    python -m benchmarks.joint_deep [--models NAME ...] [--layers N ...] [--shares X ...]
        [--limit 60] [--device H100] [--resume FILE] [--page FILE]

GPT-2 (the width of the published one) and the shape of Llama 2 70B, in bfloat16 on `meta`, the loss
inside the step, sequences of 1,024 tokens. Budgets are resident bytes and gradients, which stay, +
share x what store-all needs beyond them. Seconds are CPU time, the capture's apart from planning;
a machine with other work stretches limits as `joint_tables` does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.joint_tables import Pace
from benchmarks.kept import Kept
from benchmarks.llamas import llama
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.implementations import with_implementations
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.strategies import resolve
from memopt.strategies.joint.equal_layers import EqualLayers
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

SEQUENCE = 1024
BATCHES = {"gpt2": 32, "llama-70b": 16}
LAYERS = (10, 20, 40, 80)
SHARES = (0.40, 0.25)
HEAD = (
    "| model | layers | operators | distinct | capture, s | share | step | gap | planning, s "
    "| folded, s | |"
)


@dataclass(frozen=True)
class Row:
    """One plan, or none (overhead None). Overheads over the step as it is; seconds of CPU time."""

    model: str
    layers: int
    share: float
    operators: int
    distinct: int
    """Forward operators, those of equal layers once."""
    capture_s: float
    planning_s: float
    folded_s: float | None
    """Of them, those of the folded step and the relaxation; None: nothing was folded."""
    overhead: float | None
    gap: float | None
    source: str


def made(name: str, layers: int) -> nn.Module:
    """A model whose forward with labels gives the loss among its outputs."""
    import transformers

    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=layers, use_cache=False, attn_implementation="sdpa"
        )
        return transformers.GPT2LMHeadModel(config).train()
    return llama("llama-2-70b", layers=layers).train()


class LossOnly(nn.Module):
    """A language model whose only output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def captured(name: str, layers: int, device: Device, folder: Path) -> tuple[Graph, float]:
    """(the graph of the step, CPU seconds of its capture), both kept in `folder`."""
    begin = time.process_time()
    path = folder / f"{name}-{layers}-{device.name}.json"
    seconds_of = path.with_suffix(".seconds")
    if path.exists():
        found = loads(path.read_bytes())
        assert isinstance(found, Graph)
        return found, float(seconds_of.read_text())
    with torch.device("meta"):
        model = LossOnly(made(name, layers).to(torch.bfloat16))
        tokens = torch.zeros(BATCHES[name], SEQUENCE, dtype=torch.long)
    profiled = estimate_model(model, (tokens,), device)
    graph = with_implementations(profiled, exact_only=True, device=device).graph
    seconds = time.process_time() - begin
    folder.mkdir(parents=True, exist_ok=True)
    seconds_of.write_text(f"{seconds}")
    path.write_bytes(dumps(graph))
    return graph, seconds


def row_of(graph: Graph, capture_s: float, row: Row, device: Device, limit_s: float) -> Row:
    """A row with its plan's figures filled in."""
    base = replay(graph, store_all(graph))
    fixed = graph.resident_bytes + sum(graph.tensors[t].size_bytes for t in graph.gradients)
    budget = fixed + int(row.share * (base.peak_bytes - fixed))
    begin = time.process_time()
    overhead = gap = folded_s = None
    source = ""
    try:
        plan = solve(graph, budget, resolve("joint"), device=device, time_limit_s=limit_s)
    except MemoptError as error:
        source = str(error)
    else:
        overhead = plan.step_time_s / base.time_s - 1
        folded_s = plan.stats.get("folded_cpu_s")
        gap, source = plan.step_time_s / plan.lower_bound_s - 1, str(plan.stats["source"])
    return replace(
        row,
        operators=len(graph.operators),
        distinct=EqualLayers(graph).distinct,
        capture_s=capture_s,
        planning_s=time.process_time() - begin,
        folded_s=folded_s,
        overhead=overhead,
        gap=gap,
        source=source,
    )


def line(row: Row) -> str:
    """A row of the table as Markdown."""
    found = ["–", "–"]
    if row.overhead is not None and row.gap is not None:
        found = [f"{row.overhead:+.1%}", f"{row.gap:.1%}"]
    cells = [
        row.model, str(row.layers), str(row.operators), str(row.distinct), f"{row.capture_s:.0f}",
        f".{round(100 * row.share):02d}", *found, f"{row.planning_s:.0f}",
        "–" if row.folded_s is None else f"{row.folded_s:.0f}", row.source,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(rows: list[Row], limit_s: float) -> str:
    """The results page."""
    text = (
        f"`python -m benchmarks.joint_deep --limit {limit_s:g}`, torch {torch.__version__}, "
        f"{os.cpu_count()} cores. Estimated, bfloat16, sequences of {SEQUENCE}. Overheads over the "
        "step as it is; distinct: forward operators, those of equal layers counted once. "
        "Folded: of the planning, what saw only the folded step and the relaxation by groups of "
        "layers; the rest, which grows with the operators, builds, judges and checks the whole one."
    )
    lines = ["# Joint plans of deep models", "", text, "", HEAD, "|---|" + "---:|" * 9 + "---|"]
    rows = sorted(rows, key=lambda row: (row.model, row.share, row.layers))
    return "\n".join([*lines, *map(line, rows), ""])


def main() -> int:
    """Run from the command line; 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_deep")
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=tuple(BATCHES))
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a plan")
    parser.add_argument("--device", default="H100")
    parser.add_argument("--resume", type=Path, default=Path("out/joint-deep/rows.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    device, pace = find_device(options.device), Pace()
    kept = Kept(options.resume, Row, {"limit": options.limit, "device": device.name})
    cells = [(n, d, s) for n in options.models for d in options.layers for s in options.shares]
    try:
        for name, layers, share in cells:
            key = f"{name} {layers} {share:g}"
            if key in kept.rows:
                continue
            graph, capture_s = captured(name, layers, device, options.resume.parent)
            empty = Row(name, layers, share, 0, 0, 0.0, 0.0, None, None, None, "")
            begin = time.perf_counter()
            row = row_of(graph, capture_s, empty, device, pace.stretch * options.limit)
            pace.note(row.planning_s, time.perf_counter() - begin)
            kept.add(key, [row])
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    finally:
        if options.page is not None and kept.rows:
            rows = [row for many in kept.rows.values() for row in many]
            options.page.write_text(page(rows, options.limit), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

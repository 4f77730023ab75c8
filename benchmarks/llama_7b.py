"""A Llama-7B shape planned for one H100: the table of docs/estimate.md.

    python -m benchmarks.llama_7b [--out docs/estimate.md] [--layers 32]

bfloat16 parameters on `meta`, 4 sequences of 2,048 tokens, Rotor, one process per optimizer, so
that each row's planning time and host memory (the process's highest resident size) are its own.
With --out the table replaces what is between the markers in that page.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.llamas import llama
from memopt.report.texts import format_seconds
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

OPTIMIZERS = ("sgd", "adamw-8bit", "adamw", "adamw-fp32")
BATCH, SEQUENCE, LAYERS = 4, 2048, 32
PEAK_FLOPS_PER_S = 989e12
LIMIT_S, LIMIT_BYTES = 120.0, 4 * 2**30
BEGIN, END = "<!-- llama_7b: begin -->", "<!-- llama_7b: end -->"


def planned(optimizer: str, layers: int) -> dict[str, Any]:
    """One row; in a process of its own."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model = llama("llama-2-7b", layers=layers).to(torch.bfloat16)
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    try:
        plan = memopt.plan(
            model,
            {"input_ids": tokens, "labels": tokens},
            device="H100",
            mode="estimate",
            optimizer=optimizer,
            progress=False,
        )
        row |= {
            "budget": plan.budget,
            "baseline": plan.baseline.peak_bytes,
            "peak": plan.peak_bytes,
            "resident": plan.resident_bytes,
            "time_s": plan.step_time_s,
            "overhead": plan.overhead,
        }
    except memopt.InfeasibleBudgetError as error:
        row |= {"budget": error.budget_bytes, "refused": str(error)}
    row["planning_s"] = time.perf_counter() - begin
    row["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return row


def gib(size_bytes: int) -> str:
    """GiB with one decimal."""
    return f"{size_bytes / 2**30:.1f} GiB"


def cells(optimizer: str, row: dict[str, Any]) -> list[str]:
    """The row of the table."""
    cost = [f"{row['planning_s']:.0f} s", gib(row["host_bytes"])]
    if "refused" in row:
        return [f"`{optimizer}`", "refused, see below", "", "", "", "", "", *cost]
    tokens = BATCH * SEQUENCE
    share = 6 * row["parameters"] * tokens / row["time_s"] / PEAK_FLOPS_PER_S
    return [
        f"`{optimizer}`",
        gib(row["baseline"]),
        gib(row["resident"]),
        gib(row["peak"]),
        format_seconds(row["time_s"]),
        f"{row['overhead']:+.1%}",
        f"{tokens / row['time_s']:,.0f} ({share:.0%})",
        *cost,
    ]


HEAD = [
    "optimizer",
    "as it is",
    "of it never moves",
    "planned peak",
    "step",
    "recomputing",
    "tokens/s (share of the peak flops)",
    "planning",
    "host memory",
]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    refusals = [row["refused"] for row in rows.values() if "refused" in row]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(name, row)) + " |" for name, row in rows.items()]
    for text in refusals:
        lines += ["", "```text", *wrapped(text), "```"]
    return "\n".join(lines)


def wrapped(text: str, width: int = 100) -> list[str]:
    """Lines of words."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--one", choices=OPTIMIZERS, help="one row, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(planned(options.one, options.layers)))
        return
    rows = {}
    for name in OPTIMIZERS:
        command = [sys.executable, "-m", "benchmarks.llama_7b", "--one", name]
        command += ["--layers", str(options.layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(" | ".join(cells(name, rows[name])), flush=True)
    slowest = max(row["planning_s"] for row in rows.values())
    largest = max(row["host_bytes"] for row in rows.values())
    assert slowest <= LIMIT_S, f"planning took {slowest:.0f} s"
    assert largest <= LIMIT_BYTES, f"planning took {gib(largest)} of host memory"
    assert "refused" in rows["adamw-fp32"] or options.layers < LAYERS
    if options.out:
        page = options.out.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        text = f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

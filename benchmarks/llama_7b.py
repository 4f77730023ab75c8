"""A Llama-7B shape planned for one H100: the table of docs/estimate.md.

bfloat16 parameters on `meta`, 4 sequences of 2,048 tokens, Rotor, one process per optimizer, so
that each row's planning time and host memory (the process's highest resident size) are its own.
"""

from __future__ import annotations

import resource
import textwrap
import time
from dataclasses import dataclass
from typing import Any

import torch

import memopt
from benchmarks.runner import Benchmark, named
from benchmarks.shapes import llama
from benchmarks.table import gib, joined, table
from memopt.report.texts import format_seconds

OPTIMIZERS = ("sgd", "adamw-8bit", "adamw", "adamw-fp32")
BATCH, SEQUENCE, LAYERS = 4, 2048, 32
PEAK_FLOPS_PER_S = 989e12
LIMIT_S, LIMIT_BYTES = 120.0, 4 * 2**30


@dataclass(frozen=True)
class Row:
    """One optimizer's step: its line, the refusal, what is not as it should be."""

    text: str
    refused: str
    failed: str


def _planned(given: Any, optimizer: str) -> list[Row]:
    begin = time.perf_counter()
    with torch.device("meta"):
        model = llama("llama-2-7b", layers=given.layers).to(torch.bfloat16)
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    refused, cells = "", "refused, see below |  |  |  |  | "
    try:
        inputs = {"input_ids": tokens, "labels": tokens}
        how = {"device": "H100", "mode": "estimate", "progress": False}
        plan = memopt.plan(model, inputs, optimizer=optimizer, **how)
        count, time_s = BATCH * SEQUENCE, plan.step_time_s
        share = 6 * count * sum(p.numel() for p in model.parameters()) / time_s / PEAK_FLOPS_PER_S
        peaks = (plan.baseline.peak_bytes, plan.resident_bytes, plan.peak_bytes)
        cells = (
            f"{' | '.join(f'{gib(size)} GiB' for size in peaks)} | {format_seconds(time_s)} | "
            f"{plan.overhead:+.1%} | {count / time_s:,.0f} ({share:.0%})"
        )
    except memopt.InfeasibleBudgetError as error:
        refused = str(error)
    host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent_s = time.perf_counter() - begin
    cost = f"{spent_s:.0f} s | {gib(host_bytes)} GiB"
    wrong = f"{optimizer}: planning took {cost}" * (spent_s > LIMIT_S or host_bytes > LIMIT_BYTES)
    if optimizer == "adamw-fp32" and given.layers == LAYERS and not refused:
        wrong = f"{optimizer} is not refused"
    return [Row(f"`{optimizer}` | {cells} | {cost}", refused, wrong)]


def _blocks(rows: list[Row], _: Any) -> str:
    refusals = [f"```text\n{textwrap.fill(x.refused, 100)}\n```" for x in rows if x.refused]
    return joined(table(HEAD, [row.text for row in rows]), *refusals)


HEAD = (
    "optimizer | as it is | of it never moves | planned peak | step | recomputing | "
    "tokens/s (share of the peak flops) | planning | host memory"
)
BENCHMARK = Benchmark(
    row=Row,
    cases=named(OPTIMIZERS),
    measure=_planned,
    blocks=_blocks,
    options={"layers": LAYERS},
    apart=True,
)

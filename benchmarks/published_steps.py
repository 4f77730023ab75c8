"""How good the estimates are: every published step that memopt can express, beside its estimate.

Rows are those of `benchmarks.published`, estimates those of `benchmarks.published.estimate`.
Sources are in two halves: those of FIT were looked at while the model of costs was mended, the
others are held out. Nothing is fitted to a row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.published import measurements
from benchmarks.published.estimate import Row, estimated, row_of, why_not
from benchmarks.published.meshes import turns
from benchmarks.runner import Benchmark
from benchmarks.table import gib, joined, table
from memopt.models.presets import find_device

FIT = (
    "megatron", "torchtune", "torchtitan-2024", "torchtitan-async-tp", "raschka", "torchtitan-996",
    "llm.c",
)  # fmt: skip

LIMITS = {"memory": 0.10, "step": 0.20}
CAUSES = {
    "megatron-10 megatron-13": "times: deterministic kernels; what a GB200's products reach is "
    "assumed as on an H100",
    "megatron-9": "times: deterministic kernels",
    "megatron-89 megatron-90 megatron-91 megatron-92": "peaks: the fused loss is TorchScript, "
    "whose fusion differs between the two generations of GPUs",
    "raschka-8 raschka-10 raschka-11": "peaks: Inductor keeps what memopt's regions make again",
    "raschka-11": "times: the 15 steps that are timed are five epochs of three steps, and hold "
    "their evaluations and a sample that one rank generates while the others wait",
    "raschka-6": "times: scores are scaled and masked by kernels of their own",
    "litgpt-33 litgpt-34 litgpt-35": "peaks: FSDP1 holds some two blocks more than is counted of "
    "its flat parameters",
    "llm-foundry-21 llm-foundry-73 llm-foundry-133": "times: 30B on eight GPUs alone, whose states "
    "take three quarters of the memory; what slows it is not found",
    "llm-foundry-195 llm-foundry-196 llm-foundry-197 llm-foundry-198 llm-foundry-207 "
    "llm-foundry-208 llm-foundry-209": "times: the narrowest models on the slowest memory: what "
    "their products expose is overestimated",
    "torchtitan-2024-11": "peaks: 4 GiB more than with asynchronous collectives; suspected are the "
    "copies beside each (torch joins and splits the rows of 16 sequences by a concatenation)",
    "torchtitan-2024-13 torchtitan-2024-14": "peaks: 15 GiB lack, 7 of which only four sequences "
    "in a micro-batch have (row 15 is of as many tokens); not found: neither the allocator's holes "
    "(eight micro-batches replayed: 0.2 GiB) nor a compiled layer's backward (traced) explain it",
    "torchtitan-2024-15 torchtitan-2024-16 torchtitan-2024-17 torchtitan-2024-18": ""
    "peaks: 8 to 9 GiB lack in each; not found, see rows 13 and 14",
    "torchtitan-2024-7 torchtitan-2024-16 torchtitan-2024-18": "times: attention's rate is that of "
    "a GPU with 700 W",
    "torchtitan-2024-9 torchtitan-2024-10": "times: not found: row 9 does twice row 8's attention "
    "in nearly three times the seconds",
    "torchtitan-4636-2": "times: the peak is at 96% of the GPU's memory, where the allocator frees "
    "and asks again: a quarter of the tokens/s of recomputing everything",
    "torchtune-5": "peaks: logits in chunks and their gradients, of which some are gone already",
    "deepspeed-8255-4": "times: the allocator frees and asks again near the GPU's capacity: three "
    "times the seconds of 2,048 tokens for half as many more",
}
"""Rows beyond LIMITS → why."""

EXPOSURES = [0.5 * i for i in range(17)]
"""What is tried of the one constant of times that is fitted, `Device.product_exposure`."""
FITTED = find_device("A100").product_exposure
"""What memopt's presets say."""


def _exposed(row: Row, times: float) -> Row:
    """Take a step's products with another exposure."""
    known, found = row.step
    more = (times / FITTED - 1) * row.times["exposed"] * turns(row_of(row.name))
    return replace(row, step=(known, found + more))


def _median(rows: Sequence[Row], times: float) -> float:
    errors = _errors([_exposed(row, times) for row in rows], "step")
    return statistics.median(map(abs, errors)) if errors else 0.0


def _errors(rows: Iterable[Row], what: str) -> list[float]:
    pairs = [getattr(row, what) for row in rows]
    return [found / known - 1 for known, found in pairs if known]


def _quality(errors: Sequence[float]) -> list[str]:
    sizes = sorted(map(abs, errors))
    if not sizes:
        return ["", "", "", ""]
    within = sum(size <= 0.15 for size in sizes)
    return [str(len(sizes)), f"{statistics.median(sizes):.1%}", str(within), f"{sizes[-1]:.0%}"]


def _line(row: Row) -> list[str]:
    one = row_of(row.name)
    mesh = " ".join(f"{k} {one[k]}" for k in ("dp", "tp", "pp", "cp") if one.get(k, 1) > 1)
    how = [one.get("recompute", "") and f"{one['recompute']} recompute", one.get("sharding", "")]
    how += [f"LoRA {one['lora_rank']}"] if "lora_rank" in one else []
    how += [one[k] for k in ("kernels", "attention", "loss") if k in one]
    cells = [row.name, one["model"], f"{one['batch']} x {one['sequence']}", one["gpu"], mesh]
    cells.append(", ".join(filter(None, how)))
    for (known, found), text in ((row.memory, gib), (row.step, "{:.3f}".format)):
        shown = [text(known), text(found), f"{found / known - 1:+.0%}"] if known else [""] * 3
        cells += shown
    return cells


def _outside(rows: Iterable[Row]) -> list[list[str]]:
    """Return the rows beyond LIMITS, each with its errors and the cause."""
    lines = []
    for row in rows:
        errors = {what: sum(_errors([row], what)) for what in LIMITS}
        if any(abs(errors[what]) > limit for what, limit in LIMITS.items()):
            causes = [why for names, why in CAUSES.items() if row.name in names.split()]
            shown = [f"{one:+.0%}" if one else "" for one in errors.values()]
            lines.append([row.name, *shown, "; ".join(causes) or "not found"])
    return lines


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    known = measurements().rows
    half = {row.name: row_of(row.name)["source"] in FIT for row in rows}
    halves = {
        "all": rows,
        "looked at": [row for row in rows if half[row.name]],
        "held out": [row for row in rows if not half[row.name]],
    }
    for name in dict.fromkeys(row_of(row.name)["source"] for row in rows):
        halves[name] = [row for row in rows if row_of(row.name)["source"] == name]
    lines = [
        [
            label,
            *_quality(_errors(some, "memory")),
            *_quality(_errors(some, "step")),
            *_quality(_errors([_exposed(row, 0.0) for row in some], "step"))[1:],
        ]
        for label, some in halves.items()
    ]
    head = (
        "sources | peaks | median error | within 15% | worst | times | median error | within 15% | "
        "worst | as a roofline: median error | within 15% | worst"
    )
    fits = [
        [
            f"{times:g}",
            *(f"{_median(halves[half], times):.1%}" for half in ("looked at", "held out")),
        ]
        for times in EXPOSURES
    ]
    best = min(EXPOSURES, key=lambda times: _median(halves["looked at"], times))
    said = f"Fitted to the sources looked at: an exposure of {best:g}. The presets have {FITTED:g}."
    left = Counter(filter(None, map(why_not, known)))
    missing = [[why, str(count)] for why, count in left.most_common()]
    left_over = len(_cases()) - len(rows)
    missing += [["nothing: alike, and not run yet", str(left_over)]] if left_over else []
    listed = [
        [f"[{source['title']}]({source['url']})", source["date"], source["licence"], str(count)]
        for name, source in measurements().sources.items()
        if (count := sum(row["source"] == name for row in known))
    ]
    whole = (
        "row | model | batch | GPU | mesh | how | peak GiB, published | estimated | error | "
        "step s, published | estimated | error"
    )
    return {
        "summary": joined(table(head, lines), said),
        "fit": table("exposure | looked at: median error of times | held out", fits),
        "outside": table("row | peak | time | cause", _outside(rows)),
        "rows": table(whole, map(_line, rows)),
        "left": table("memopt or this script has no | rows", missing),
        "sources": table("source | date | licence | rows", listed),
    }


def _cases() -> dict[str, tuple[str]]:
    return {row["name"]: (row["name"],) for row in measurements().rows if not why_not(row)}


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda _: _cases(),
    measure=estimated,
    blocks=_blocks,
    page="docs/results/published.md",
)

"""Language models with MONeT's implementations: chunked loss, packed masks, recomputed attention.

    OMP_NUM_THREADS=1 python -m benchmarks.monet_language [--folder FOLDER]
        [--out docs/results/monet_language.md] [--limit SECONDS] [--rounds N]
        [--only estimated|run] [--until profile|plans]

GPT-2 and a Llama shape with their loss in the module, so that the logits are the plan's to leave
out. Estimated for an H100 at batch 32 × 512 tokens, and small ones really run on this CPU. Plans
and finished rows are kept in FOLDER; --until as for monet_real, of those that run.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.kept import Kept
from benchmarks.losses import WithLoss
from benchmarks.monet_real import MEANING, OVERHEAD, Row, Until, Way, run, table
from benchmarks.monet_runs import GIB, Record, Runs, kept_graph
from memopt.implementations import with_implementations
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.profiler.estimate import estimate_model
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.rotor import Rotor
from tests.zoo import get
from tests.zoo.language import logits_loss

DEVICE = "H100"
BATCH = 32
MODELS = ("gpt2", "llama")
EXACT, MENUS, ALL_MENUS = Monet(), RotorMenus(), RotorMenus(exact_only=False)
WAYS: dict[str, Way] = {
    "Rotor": lambda _runs, _budget: Rotor(),
    "rotor-menus": lambda _runs, _budget: MENUS,
    "MONeT, exact": lambda _runs, _budget: EXACT,
    "MONeT": lambda runs, budget: runs.started(budget, ALL_MENUS, MENUS, EXACT),
}
"""The last starts from the plans of the two before it, and of menus with all implementations."""
SMALL = {"gpt2": (8, 256), "llama": (4, 128)}
"""Batch and tokens of those that really run: logits that fill the memory, or weights."""
SMALL_VOCABULARY = 8192


def estimated(name: str) -> Graph:
    """The priced graph of a family's step with its loss, at its published size."""
    family, device = get(name), find_device(DEVICE)
    with torch.device("meta"):
        model = WithLoss(family.build("paper").train(), family.loss)
    profiled = estimate_model(model, family.inputs("paper", batch=BATCH), device)
    return with_implementations(profiled, device=device).graph


def estimated_rows(name: str, folder: Path, limit_s: float) -> list[str]:
    """Lines of the first table, one for each strategy."""
    graph = kept_graph(folder / f"{name}-loss-b{BATCH}.json", lambda: estimated(name))
    runs = Runs(f"{name}-loss", graph, folder, limit_s, find_device(DEVICE))
    lines = []
    rotor: Record | None = None
    for way, strategy_at in WAYS.items():
        found = runs.memory_at(partial(strategy_at, runs), OVERHEAD)
        rotor = found if way == "Rotor" else rotor
        if found is None or found.peak_bytes is None:
            lines.append(f"| {name} | {runs.base_bytes / GIB:.1f} | {way} | none | | | | |")
            continue
        beside = "" if rotor is None else f"{found.peak_bytes / (rotor.peak_bytes or 1):.2f}"
        lines.append(
            f"| {name} | {runs.base_bytes / GIB:.1f} | {way} | {found.peak_bytes / GIB:.2f} "
            f"({found.peak_bytes / runs.base_bytes:.2f}) | {beside} | {runs.overhead(found)} | "
            f"{found.planning_s:.0f} | {found.chosen or 'none'} |"
        )
    return lines


def small(name: str) -> nn.Module:
    """A few layers and a vocabulary that matters, with the loss."""
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=4,
            n_embd=256,
            n_head=4,
            n_positions=SMALL[name][1],
            vocab_size=SMALL_VOCABULARY,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=SMALL_VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SMALL[name][1],
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = transformers.LlamaForCausalLM(config)
    return WithLoss(model.train(), logits_loss)


def run_rows(folder: Path, limit_s: float, rounds: int, until: Until) -> list[Row]:
    """Small models, planned every way, run beside eager."""
    kept = Kept(folder / "language-rows.json", Row, {"limit_s": limit_s})
    for name in kept.missing(MODELS, lambda note: sys.stderr.write(f"{note}\n")):
        words = torch.randint(3, SMALL_VOCABULARY, SMALL[name], generator=torch.manual_seed(1))
        rows = run(
            name, small(name), {"input_ids": words}, WAYS, folder, limit_s, rounds,
            until=until, exact_only=False,
        )  # fmt: skip
        if until is Until.END:
            kept.add(name, rows)
    return kept.ordered(MODELS)


def page(lines: list[str], rows: list[Row], command: str, limit_s: float) -> str:
    """The whole page."""
    head = [
        "# Language models with implementations",
        "",
        f"`{command}`, on a shared machine; at most {limit_s:g} s of planning each.",
        "",
        f"Least memory within 10% of time overhead, estimated for one {DEVICE}: batch {BATCH} of "
        "512 tokens, single precision, the loss in the module. GiB, and share of the step without "
        "a plan. 'exact' leaves out what changes rounding: the chunked cross-entropy and attention "
        "from its inputs.",
        "",
        "| model | GiB without | strategy | at 10% | over Rotor's | overhead | s | chosen |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
    ]
    if rows:
        head += [
            "",
            "## Really run",
            "",
            f"Four layers of width 256, {SMALL_VOCABULARY} words, one thread of this machine's "
            "CPU: plans of least memory whose predicted overhead is 10%. " + MEANING,
            "",
            *table(rows),
        ]
    return "\n".join([*head, ""])


def main() -> None:
    """Print the page, and write it after every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-language"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("estimated", "run"))
    parser.add_argument("--until", type=Until, default=Until.END, choices=tuple(Until))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m benchmarks.monet_language"
    rows = (
        []
        if options.only == "estimated"
        else run_rows(options.folder, options.limit, options.rounds, options.until)
    )
    lines: list[str] = []
    for name in () if options.only == "run" else options.models:
        lines += estimated_rows(name, options.folder, options.limit)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(page(lines, rows, command, options.limit))
    text = page(lines, rows, command, options.limit)
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

"""Seconds from the call to a plan with compiled kernels, of GPT-2 with 12 and with 48 layers.

    python -m benchmarks.compiled_planning [--layers 12 48] [--strategy rotor] [--budget 0.7]
        [--threads 1] [--out FILE]

Each figure is of a process of its own: first with empty caches (Inductor's and memopt's), then with
those that the first one left. CPU seconds are those of the call and of all compilers that it began.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import memopt
from benchmarks.peers.contests import VOCABULARY, gpt2, made


@dataclass(frozen=True)
class Figures:
    """One call.

    Attributes:
        wall_s: seconds from the call to the plan.
        cpu_s: of all threads and processes in that time.
        before_s: CPU seconds of the process before the call, for imports and the model.
        regions, distinct: compiled regions of the step, and different ones among them.
    """

    wall_s: float
    cpu_s: float
    before_s: float
    regions: int
    distinct: int


def planned(layers: int, strategy: str, budget: float) -> Figures:
    """Plan in this process; `cpu_s` is left to the process that began it."""
    contest = made(lambda: gpt2(VOCABULARY, layers))
    before_s, begin = time.process_time(), time.perf_counter()
    plan = memopt.plan(
        contest.module,
        contest.inputs,
        budget=budget,
        strategy=strategy,
        kernels="compiled",
        progress=False,
    )
    wall_s = time.perf_counter() - begin
    targets = [one.target for one in plan.graph.operators if one.target.startswith("memopt.fused")]
    return Figures(wall_s, 0.0, before_s, len(targets), len(set(targets)))


def in_a_process(arguments: Sequence[str], folder: Path) -> Figures:
    """`planned` in a new process whose caches are in a folder."""
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "MEMOPT_CACHE_DIR": "memopt"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.compiled_planning", *arguments]
    text = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = Figures(**json.loads(text.splitlines()[-1]))
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figures(found.wall_s, spent - found.before_s, *list(asdict(found).values())[2:])


def main() -> None:
    """Measure, print, and write a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--strategy", default="rotor")
    parser.add_argument("--budget", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=1, help="of torch; compilers run beside")
    parser.add_argument("--once", action="store_true", help="plan in this process and print JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.once:
        figures = planned(options.layers[0], options.strategy, options.budget)
        print(json.dumps(asdict(figures)))
        return
    lines = [
        "| layers | caches | regions (distinct) | wall, s | CPU, s |",
        "|---:|---|---|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    shared = ["--strategy", options.strategy, "--budget", str(options.budget)]
    shared += ["--threads", str(options.threads), "--once"]
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("cold", "warm"):
                one = in_a_process(["--layers", str(layers), *shared], Path(folder))
                lines.append(
                    f"| {layers} | {caches} | {one.regions} ({one.distinct}) "
                    f"| {one.wall_s:.1f} | {one.cpu_s:.1f} |"
                )
                print(lines[-1], flush=True)
    if options.out:
        command = "python -m benchmarks.compiled_planning"
        about = f"`{command}`; {os.cpu_count()} cores, torch {torch.__version__}, "
        about += f"{options.strategy}, budget {options.budget:g}."
        title = "# Time to a plan of compiled kernels"
        options.out.write_text("\n".join([title, "", about, "", *lines, ""]))


if __name__ == "__main__":
    main()

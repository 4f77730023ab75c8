"""`python -m benchmarks NAME [options]`: one benchmark; without a name every one in turn.

In turn, each runs in a process of its own; one that fails does not stop the others, and fails the
whole. `python -m benchmarks NAME --help` says what NAME measures.
"""

from __future__ import annotations

import subprocess
import sys
import time

NAMES = (
    "rotor_solve", "rotor_paper", "peers", "auto_portfolio", "limits", "offload_paper",
    "olla_tables", "olla_steps", "olla_programs", "olla_cp_sat", "minimalloc", "hard_placements",
    "forward_graphs", "joint_tables", "partitioner", "compiled_planning", "published_steps",
    "published_decisions", "monet_table1", "monet_ablation", "monet_real", "arena", "cluster",
    "estimate_accuracy", "prediction", "trainer_architectures", "sharded", "engines", "moved_llama",
    "long_context",
)  # fmt: skip
GPU = ("gpu",)
"""What needs a CUDA device."""


def main(words: list[str]) -> int:
    """Run a benchmark, or all: then give the number of those that failed."""
    if words:
        return one(*words)
    outcomes = []
    for name in NAMES:
        print(f"== python -m benchmarks {name}", flush=True)
        begin = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", "benchmarks", name], check=False).returncode
        outcomes.append((name, code, time.perf_counter() - begin))
    for name, code, seconds in outcomes:
        print(f"{name:20} {'ok' if code == 0 else f'exit {code}':8} {seconds:7.0f} s")
    return sum(code != 0 for _, code, _ in outcomes)


def one(name: str, *words: str) -> int:
    """Run the benchmark of this name."""
    if name not in (*NAMES, *GPU):
        print(f"{__doc__}\nThere are {', '.join((*NAMES, *GPU))}.", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    from benchmarks.runner import run

    return run(name, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

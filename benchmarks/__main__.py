"""`make bench`: every benchmark of this folder in turn. `python -m benchmarks [--gpu] [NAME ...]`

Each runs in a process of its own; one that fails does not stop the others, and fails the whole.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

CPU = (
    "rotor_solve",
    "checkpointing",
    "peers",
    "auto_grid",
    "rotor_families",
    "rotor_paper",
    "offload_paper",
    "offload_solve",
    "olla_tables",
    "olla_programs",
    "minimalloc",
    "hard_placements",
    "forward_graphs",
    "joint_tables",
    "joint_deep",
    "joint_pictures",
    "partitioner",
    "compiled_planning",
    "published_steps",
    "monet_menus",
    "monet_scale",
    "monet_windows",
    "monet_table1",
    "monet_ablation",
    "monet_real",
    "monet_language",
    "arena",
    "steering",
    "llama_7b",
    "cluster",
    "estimate_accuracy",
    "prediction",
    "trainer_architectures",
    "sharded",
    "gloo_threads",
    "explorer",
    "moved_llama",
    "moved_steps",
)
GPU = ("gpu",)
CAPTURES = ("olla_graphs", "rotor_chains")
"""Scripts that only make what others read."""


def main() -> int:
    """Run what is named, or everything; the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="those that need a CUDA device")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*CPU, *GPU)))
    options = parser.parse_args()
    names = options.names or (GPU if options.gpu else CPU)
    unknown = [name for name in names if name not in (*CPU, *GPU)]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join((*CPU, *GPU))}")
    outcomes = []
    for name in names:
        print(f"== python -m benchmarks.{name}", flush=True)
        begin = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        outcomes.append((name, code, time.perf_counter() - begin))
    for name, code, seconds in outcomes:
        print(f"{name:20} {'ok' if code == 0 else f'exit {code}':8} {seconds:7.0f} s")
    return sum(code != 0 for _, code, _ in outcomes)


if __name__ == "__main__":
    sys.exit(main())

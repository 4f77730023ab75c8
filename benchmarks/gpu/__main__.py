"""`python -m benchmarks.gpu [--device cuda|cpu] [--size paper|tiny] [--only NAME] [--rounds 7]`

Runs everything and prints one table last; each model's rows are printed when they are ready.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.gpu.offload import MODELS, Row, measure, table


def main() -> None:
    """Parse the arguments and run the models one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("tiny", "paper"), default="paper")
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5])
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; say --device cpu --size tiny for a dry run")
    rows: list[Row] = []
    for name in options.only or MODELS:
        found = measure(name, options.size, device, tuple(options.shares), options.rounds)
        print(table(found), flush=True)
        rows += found
    print(f"\ntorch {torch.__version__} on {options.device}, {options.size} sizes\n")
    print(table(rows))


if __name__ == "__main__":
    main()

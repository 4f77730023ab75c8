"""Chains of the zoo's models, estimated for the V100 of Rotor's experiments.

    python -m benchmarks.rotor_chains [--folder FOLDER] [MODEL:PIXELS ...]

captures the named ones into FOLDER, so that a later run of
rotor_paper or rotor_families reads them there. Pixels 0: the family's own input.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import memopt
from memopt.models.chain import Chain
from memopt.programs.serialize import dumps, loads
from memopt.reductions.linearize import linearize
from tests.zoo import get

DEVICE = "V100-PCIe"
BATCH = 8
"""The largest batch of Rotor's figures 6 and 7, taken for every model."""


def estimated_chain(name: str, pixels: int, folder: Path | None, batch: int = BATCH) -> Chain:
    """The chain of a model's step at its published size, read from `folder` if it is there.

    Args:
        name: a family or variant of the zoo.
        pixels: the images' height and width; 0: the family's own inputs.
        folder: where captured chains are kept; None: capture anew.
        batch: examples in a step.
    """
    path = None if folder is None else folder / f"{name}-{pixels}-b{batch}.json"
    if path is not None and path.exists():
        found = loads(path.read_bytes())
        if isinstance(found, Chain):
            return found
    family = get(name)
    with torch.device("meta"):
        model = family.build("paper")
    inputs = (
        (torch.zeros(batch, 3, pixels, pixels),) if pixels else family.inputs("paper", batch=batch)
    )
    graph = memopt.profile(model, inputs, device=DEVICE, mode="estimate", progress=False)
    chain = linearize(graph).chain
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dumps(chain))
    return chain


def main() -> None:
    """Capture, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/rotor-chains"))
    parser.add_argument("cases", nargs="+", help="MODEL:PIXELS")
    options = parser.parse_args()
    for case in options.cases:
        name, _, pixels = case.partition(":")
        started = time.perf_counter()
        chain = estimated_chain(name, int(pixels or 0), options.folder)
        seconds = time.perf_counter() - started
        sys.stdout.write(f"{case}: {len(chain)} stages, {seconds:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

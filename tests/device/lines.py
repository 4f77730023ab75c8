"""`python -m tests.device.lines [PATH ...]`: the lines that decide what a device does and that no
test of this folder runs; 1 if there is one."""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
import torch

from tests.device.interpreter import CHILD, HERE

LINES: dict[str, tuple[str, ...]] = {
    "executor/swap_streams.py": ("DeviceStreams", "PoolLease", "PooledCopy", "StreamSwap"),
    "executor/graph_segments.py": ("Segments", "_without_owning"),
    "executor/recorder.py": ("DeviceClock", "Recorder"),
    "executor/homes.py": ("Homes",),
    "pricing/memory.py": ("metered",),
    "pricing/measure.py": ("_sample",),
    "pricing/device_measure.py": (
        *("measure_device", "host_update_rate", "at_once"),
        *("_capacity", "_link", "_bandwidth", "_launch", "_rates"),
    ),
    "pricing/device_probes.py": ("best_s", "fastest_s", "seconds_of"),
}
"""Classes and functions, by their file in memopt/."""
ON_HOST = ("runtime is None", "on_host")
"""In the conditions of what is for a CPU alone."""
OF_HOST = ("timed", "waited")
"""Methods that copies and collectives of a CPU call."""
ROOT = HERE.parent.parent


def lines_of(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, set[int]]]:
    """The lines of a file's classes and functions that a device may run."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            left = set[int]()
            for one in ast.walk(node):
                if isinstance(one, ast.FunctionDef) and one.name in OF_HOST:
                    left |= _spanned(one)
                elif isinstance(one, ast.If) and ast.unparse(one.test).endswith(ON_HOST):
                    left |= set[int]().union(*map(_spanned, one.body))
            yield node.name, _spanned(node) - left


def _spanned(node: ast.stmt) -> set[int]:
    assert node.end_lineno is not None
    return set(range(node.lineno, node.end_lineno + 1))


def seen_by_autograd() -> None:
    """Measure the threads of autograd, too, which Python has not started."""
    own = torch.autograd.function.BackwardCFunction
    for name in ("apply", "apply_boxed"):
        setattr(own, name, _traced(getattr(own, name)))


def _traced(apply: Any) -> Any:
    def traced(self: Any, *arguments: Any) -> Any:
        if sys.gettrace() is None:
            sys.settrace(threading.gettrace())
        return apply(self, *arguments)

    return traced


def main(paths: list[str]) -> int:
    """Run tests in this process, and print what they leave out."""
    os.environ[CHILD] = "here"
    files = [str(ROOT / "memopt" / name) for name in LINES]
    measured = coverage.Coverage(include=files, data_file=None)
    measured.start()
    seen_by_autograd()
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    failed = pytest.main([*options, *(paths or [str(HERE)])])
    measured.stop()
    every, left = 0, 0
    for name, names in LINES.items():
        path = ROOT / "memopt" / name
        _, statements, _, missing, _ = measured.analysis2(str(path))
        for one, span in lines_of(path, names):
            own = [line for line in missing if line in span]
            every, left = every + sum(line in span for line in statements), left + len(own)
            print(f"{name} {one}: {', '.join(map(str, own)) or 'all run'}")
    print(f"{every - left} of {every} lines run")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

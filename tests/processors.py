"""Runs a command as on a processor without AVX-512 that is not Intel's: kernels round otherwise and
take other scratch memory there. Needs gcc.

python -m tests.processors python -m pytest -m "not slow and not gpu and not browser"

torch's own kernels and oneDNN read what they may use from the environment. MKL asks the processor
for its maker; functions of the same names in a preloaded library answer in its place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ANSWERS = """
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
"""


def main(command: list[str]) -> int:
    """The command's exit status."""
    if not command:
        print("usage: python -m tests.processors COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "maker.so"
        compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=_ANSWERS, text=True, check=True)
        told = {
            "LD_PRELOAD": str(library),
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        }
        return subprocess.run(command, env={**os.environ, **told}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

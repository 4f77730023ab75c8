"""Print the table: each situation under each way, with the verdict."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time

os.environ.setdefault("MEMOPT_CACHE_DIR", tempfile.mkdtemp())
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import Counter
from pathlib import Path

from tests.surroundings.judge import allowed, judge
from tests.surroundings.situation import WAYS
from tests.surroundings.table import SITUATIONS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.surroundings", description=__doc__)
    parser.add_argument("names", nargs="*", help="regular expressions of situations; none: all")
    parser.add_argument("--way", action="append", choices=WAYS, help="only these ways")
    parser.add_argument("--done", default="", help="a file of lines printed before: not again")
    parser.add_argument("--part", default="0/1", help="I/N: the I-th of N parts of the table")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    done = Path(given.done).read_text() if given.done else ""
    count: Counter[str] = Counter()
    for number, (name, one) in enumerate(SITUATIONS.items()):
        if number % parts != part:
            continue
        if given.names and not any(re.search(wanted, name) for wanted in given.names):
            continue
        for way in one.ways:
            if (given.way and way not in given.way) or f"{name:34} {way} " in done:
                continue
            began = time.process_time()
            verdict = judge(one, way)
            kind = verdict.kind if verdict.kind in allowed(one, way) else "WRONG"
            count[kind] += 1
            took = time.process_time() - began
            reason = verdict.reason if kind == verdict.kind else f"{verdict.kind}: {verdict.reason}"
            print(f"{name:34} {way:10} {kind:9} {took:4.1f} {reason}", flush=True)
    print(dict(count))


if __name__ == "__main__":
    main()

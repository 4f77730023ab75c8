"""Run by test_round_trip in a new process: apply saved plans, print what a step leaves behind.

Arguments: model=path of a plan file, any number of them. Prints one JSON object: path → digest.
"""

from __future__ import annotations

import json
import sys

import memopt
from tests.plan.tiny import make, step_digest


def main() -> None:
    found = {}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        plan = memopt.load(path)
        # Without inputs: they come from the file.
        found[path] = step_digest(name, plan.apply(make(name)[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

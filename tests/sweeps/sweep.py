"""The sweep itself: an operator in a layout, under four plans, against eager.

    python -m tests.sweeps.sweep --out FILE [--first N] [--count N] [--only NAME]

writes a line of JSON per operator and layout; `python -m tests.sweeps.sweep --read FILE` sorts what
failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.errors import CaptureError
from memopt.executor.apply import apply_plan
from memopt.executor.check import summed, unmetered_bytes
from memopt.executor.out_variants import for_placing
from memopt.pricing.measure import MeasureOptions
from memopt.pricing.memory import metered
from memopt.profiler.session import profile_model
from memopt.step.profiled import Profiled
from memopt.user_code.restored_state import state_restored
from tests.executor.harness import Case, Record, _bits, run_steps
from tests.sweeps import elementwise, networks, shaped
from tests.sweeps.subjects import LAYOUTS, Subject, Table, Together, inputs

TABLE: Table = {**elementwise.TABLE, **shaped.TABLE, **networks.TABLE}

PLANS: dict[str, dict[str, Any]] = {
    "store-all": {"strategy": "store-all"},
    "rotor": {"strategy": "rotor", "budget": "min"},
    "placed": {"strategy": "rotor", "place": True},
    "olla": {"strategy": "olla"},
}


@dataclass(frozen=True)
class Finding:
    """What is wrong with a plan's steps; `what` is one line."""

    plan: str
    what: str


def differences(found: Record, expected: Record) -> list[str]:
    """Names of what differs in a bit, with by how much."""
    wrong = []
    for (name, a), (_, b) in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
            same = (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bits(a), _bits(b))
            if not same:
                far = (a.double() - b.double()).abs().max().item() if a.shape == b.shape else "?"
                wrong.append(f"{name}: {far:.1e}" if isinstance(far, float) else f"{name}: shape")
            elif a.stride() != b.stride():
                wrong.append(f"{name}: stride {a.stride()}, eager {b.stride()}")
        elif a is not b and a != b:
            wrong.append(f"{name}: {a!r}, eager {b!r}")
    return wrong


def profiled(model: Together, x: torch.Tensor) -> Profiled:
    """The model, measured quickly: times do not matter here."""
    return profile_model(model, x, options=MeasureOptions(cap_s=0.001, max_rounds=1))


def findings(cases: Sequence[tuple[str, str]]) -> list[Finding]:
    """What is wrong with operators in layouts, (name, layout) each, as one model under each plan;
    [] where nothing is."""
    torch.manual_seed(0)
    try:
        model = Together([Subject(TABLE[name], layout) for name, layout in cases])
        start = copy.deepcopy(model.state_dict())
        case = Case(lambda: model, lambda: (inputs(),), steps=3)
        reference = copy.deepcopy(model)
        expected = run_steps(case, reference, reference)
    except RuntimeError as error:
        return [Finding("eager", f"raises: {_line(error)}")]
    try:
        base = profiled(model, inputs())
        placing = for_placing(base)
    except CaptureError as error:
        return [Finding("capture", f"refused: {_line(error)}")]
    except Exception as error:  # noqa: BLE001  # a sweep reports whatever happens
        return [Finding("capture", f"{type(error).__name__}: {_line(error)}")]
    found: list[Finding] = []
    for name, options in PLANS.items():
        model.load_state_dict(start)
        for parameter in model.parameters():
            parameter.grad = None
        source = placing if name in ("placed", "olla") else base
        try:
            plan = memopt.plan(source, progress=False, time_limit_s=5, **options)
            planned = apply_plan(plan, model)
            wrong = differences(run_steps(case, planned, model), expected)
            measured = _peak(plan, planned, model)
        except Exception as error:  # noqa: BLE001  # a sweep reports whatever happens
            found.append(Finding(name, f"{type(error).__name__}: {_line(error)}"))
            continue
        if wrong:
            found.append(Finding(name, "; ".join(wrong[:6])))
        limit = plan.budget if plan.budget is not None else plan.peak_bytes
        if measured > limit:
            what = f"peak {measured} > {limit}, predicted {plan.peak_bytes}"
            found.append(Finding(name, what))
    return found


def apart(cases: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], list[Finding]]]:
    """What is wrong with each case: all together first, and each half alone where something is."""
    found = findings(cases)
    if len(cases) == 1 or not found:
        yield from ((case, found) for case in cases)
        return
    torch._dynamo.reset()
    half = len(cases) // 2
    for part in (cases[:half], cases[half:]):
        yield from apart(part)


def _peak(plan: memopt.Plan, planned: Any, model: Together) -> int:
    x = inputs()
    with state_restored(model, plan.profiled.captured.call):
        for parameter in model.parameters():
            parameter.grad = None
        with metered(torch.device("cpu")) as use:
            output = planned(x)
            summed(output, plan.output_gradients).backward()
        del output
    return unmetered_bytes(plan, torch.device("cpu")) + use.peak_bytes


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:240]


def main() -> None:
    """Run a part of the sweep, or read what one has found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--skip", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--together", type=int, default=12)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.read:
        _report(options.read)
        return
    names = [n for n in TABLE if re.search(options.only, n)]
    cases = [(name, layout) for name in names for layout in options.layouts.split(",")]
    if options.skip:
        known = [json.loads(line) for line in options.skip.read_text().splitlines()]
        done = {(one["operator"], one["layout"]) for one in known if not one["found"]}
        cases = [case for case in cases if case not in done]
    random.Random(options.seed).shuffle(cases)
    cases = cases[options.first : options.first + options.count]
    for position in range(0, len(cases), options.together):
        for case, found in apart(cases[position : position + options.together]):
            line = json.dumps(
                {"operator": case[0], "layout": case[1], "found": [[f.plan, f.what] for f in found]}
            )
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")
            elif found:
                sys.stdout.write(line + "\n")
        torch._dynamo.reset()


def _report(path: Path) -> None:
    causes: dict[str, list[str]] = defaultdict(list)
    count: Counter[str] = Counter()
    for text in path.read_text().splitlines():
        one = json.loads(text)
        count["cases"] += 1
        own = any(plan != "eager" for plan, _ in one["found"])
        count["bad" if own else "not in eager" if one["found"] else "good"] += 1
        for plan, what in one["found"]:
            kind = re.sub(r"[\d.]+(e[-+]\d+)?", "#", what)[:110]
            causes[f"{plan}: {kind}"].append(f"{one['operator']} / {one['layout']}")
    sys.stdout.write(f"{dict(count)}\n")
    for cause, where in sorted(causes.items(), key=lambda item: -len(item[1])):
        sys.stdout.write(f"{len(where):4d} {cause}\n       {', '.join(where[:12])}\n")


if __name__ == "__main__":
    main()

"""Forms of compiled regions: what they keep and save, and what a choice of them is worth.

    python -m benchmarks.kernel_forms [--only gpt2 vit llama] [--shares 1.0 0.7 0.5 0.3]
        [--strategies rotor-menus] [--rounds 15] [--out FILE]

Plans run in turns on one thread. A step's time is the sum, over the program's instructions, of the
median CPU seconds of each: another process on the machine disturbs that least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import memopt
from benchmarks.peers.contests import CONTESTS, Contest, build
from benchmarks.steps import clear, peak_of
from memopt.api.plan import Plan
from memopt.errors import InfeasibleBudgetError
from memopt.executor.apply import apply_plan
from memopt.executor.recorder import HostClock, Recorder
from memopt.implementations import attach, regions, with_implementations
from memopt.implementations.region_choice import Needs, forms_of, is_product, kept_bytes, more_s
from memopt.models.graph import Phase
from memopt.profiler.backend import backend_of
from memopt.profiler.cache import ProfileCache
from memopt.profiler.measure import MeasureOptions
from memopt.profiler.session import Profiled, profile_model

CPU = torch.device("cpu")
MIB = 2**20
DEFAULT = ("gpt2", "vit", "llama")
FORMS = (
    "| model | region | form | times in the step | keeps more, MiB in all | its kernel, µs "
    "| the form's, µs | more in the forward, µs | |",
    "|---|---|---|---:|---:|---:|---:|---:|---|",
)
CHOICES = (
    "| model | strategy | share of the baseline | budget, MiB | peak, one form | with choice "
    "| forms chosen | predicted time / one form's | measured |",
    "|---|---|---:|---:|---:|---:|---|---:|---:|",
)


@dataclass(frozen=True)
class Profiles:
    """One contest, profiled once.

    Attributes:
        plain: as it was profiled.
        one: with alternatives, but no forms of regions.
        all: with forms.
    """

    contest: Contest
    plain: Profiled
    one: Profiled
    all: Profiled


def profiles(name: str) -> Profiles:
    """Measured anew where the cache has nothing."""
    contest = build(name)
    options = MeasureOptions(cache=ProfileCache())
    plain = profile_model(contest.module, contest.inputs, kernels="compiled", options=options)
    bare = replace(plain, lowering=replace(plain.lowering, forms=()))
    one, every = (with_implementations(p, exact_only=True, options=options) for p in (bare, plain))
    return Profiles(contest, plain, one, every)


def form_rows(found: Profiles) -> Iterator[str]:
    """A line for each distinct form of the backward's regions."""
    plain = found.plain
    blocks = backend_of(plain.torch_device).block_bytes
    lowering = regions.usable(
        attach(plain.lowering, exact_only=True, block_bytes=blocks), plain.torch_device
    )
    figures = regions.figures(
        plain.graph, lowering, plain.torch_device, MeasureOptions(cache=ProfileCache())
    )
    operators = [
        replace(
            plain.graph.operators[op],
            implementations=tuple(
                replace(choice, **figures[op, choice.name])
                for choice in one.implementations
                if (op, choice.name) in figures
            ),
        )
        for op, one in enumerate(lowering.graph.operators)
    ]
    lowering = replace(lowering, graph=replace(lowering.graph, operators=tuple(operators)))
    keys = set(forms_of(lowering))
    offered = set(forms_of(replace(found.all.lowering, graph=found.all.graph)))
    needs = Needs(lowering, keys)
    groups = defaultdict(list)
    for key in sorted(keys):
        backward = operators[key[0]].phase is Phase.BACKWARD
        if backward and not is_product(lowering, key):
            groups[str(lowering.alternatives[key].target), key[1]].append(key)
    for (_, form), group in groups.items():
        ops = [operators[op] for op, _ in group]
        own = statistics.median(one.time_s for one in ops) * 1e6
        its = statistics.median(needs.form[key].time_s for key in group) * 1e6
        more = statistics.median(more_s(needs, key) for key in group) * 1e6
        kept = sum(kept_bytes(needs, key) for key in group) / MIB
        known = sum(key in offered for key in group)
        said = "offered" if known == len(group) else f"{known} offered" if known else "left out"
        yield (
            f"| {found.contest.name} | `{ops[0].name.removeprefix('fused_')}` | {form} "
            f"| {len(group)} | {kept:.1f} | {own:.0f} | {its:.0f} | {more:.0f} | {said} |"
        )


class _CpuClock(HostClock):
    """A recorder's clock that stands while other processes run."""

    def now(self) -> float:
        """CPU seconds of this process."""
        return time.process_time()


def choice_row(found: Profiles, strategy: str, share: float, rounds: int) -> str:
    """One budget: the plan with one form of each region, and the plan that chooses."""
    budget = round(share * found.plain.baseline.peak_bytes)
    begin = f"| {found.contest.name} | {strategy} | {share:g} | {budget / MIB:.1f} |"
    plans: dict[str, Plan] = {}
    try:
        for name, profiled in (("one", found.one), ("all", found.all)):
            plans[name] = memopt.plan(profiled, budget=budget, strategy=strategy, progress=False)
    except InfeasibleBudgetError as error:
        least = error.smallest_budget_bytes or 0
        return f"{begin} no plan below {least / MIB:.1f} MiB | | | | |"
    module = found.contest.module
    recorders = {name: Recorder(_CpuClock()) for name in plans}
    runs = {
        name: apply_plan(plan, module, recorder=recorders[name]) for name, plan in plans.items()
    }
    steps = {name: lambda run=run: found.contest.step(run) for name, run in runs.items()}
    peaks = {
        name: (peak_of(module, step, CPU) + plans[name].resident_bytes) / MIB
        for name, step in steps.items()
    }
    parts: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            clear(module)
            recorders[name].take()
            step()
            for one in recorders[name].take():
                parts[name][one.position].append(one.end_s - one.start_s)
    times_s = {name: sum(map(statistics.median, one.values())) for name, one in parts.items()}
    names = Counter(run.implementation for _, run in plans["all"].program.computes)
    chosen = ", ".join(f"{count} {name}" for name, count in sorted(names.items(), key=str) if name)
    predicted = plans["all"].step_time_s / plans["one"].step_time_s
    return (
        f"{begin} {peaks['one']:.1f} | {peaks['all']:.1f} | {chosen} | {predicted:.3f} "
        f"| {times_s['all'] / times_s['one']:.3f} |"
    )


def page(forms: list[str], choices: list[str], command: str, rounds: int) -> str:
    """The results page."""
    about = (
        f"`{command}`; CPU, one thread, torch {torch.__version__}. Times of forms are measured, "
        "each in turns with the kernel in whose place it stands. Peaks are measured, parameters "
        f"included. Measured times are those of the instructions, in steps of both plans in turns: "
        f"the sum of the median CPU seconds of each in {rounds} steps. Chosen forms include those "
        "of products, which read the forward's tensor, and of the forward's regions."
    )
    title = "# Forms of compiled regions"
    return "\n".join([title, "", about, "", *FORMS, *forms, "", *CHOICES, *choices, ""])


def main() -> None:
    """Measure, print, and write the page after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(CONTESTS), default=("gpt2", "vit", "llama")
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.7, 0.5, 0.3])
    parser.add_argument("--strategies", nargs="+", default=["rotor-menus"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m benchmarks.kernel_forms --strategies {' '.join(options.strategies)}"
    forms: list[str] = []
    choices: list[str] = []
    for name in options.only:
        found = profiles(name)
        forms += form_rows(found)
        print(*FORMS, *forms, sep="\n", flush=True)
        for strategy in options.strategies:
            for share in options.shares:
                choices.append(choice_row(found, strategy, share, options.rounds))
                print(choices[-1], flush=True)
                if options.out:
                    text = page(forms, choices, command, options.rounds)
                    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

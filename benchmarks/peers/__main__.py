"""Peers' measured peaks and step times, and memopt's best plan at each of these peaks.

    python -m benchmarks.peers [--only NAME ...] [--rounds 7] [--threads 1] [--compile 1.0 0.5]
        [--kernels aten compiled auto] [--own-random] [--limit SECONDS] [--out FILE]
        [--resume FILE] [--fresh]

Peaks exclude what is resident (parameters, inputs). All steps of a model are timed interleaved.
Compiled peers run fused kernels: where memopt has ATen's alone (--kernels aten), each is compared
by its overhead over its own store-all (`torch.compile` with budget 1.0), memopt's by its overhead
over memopt's store-all. With other kernels too, memopt's plan is the fastest of all, and step times
are compared as they are, in units of eager's. `torch.compile` draws random numbers as eager does,
which takes time; with --own-random, as it does by default.

Compiled kernels draw their own random numbers: their answers are compared with those of an eager
step whose dropouts drop the same elements.

A finished model's rows are kept in a JSON file (--resume; in out/ by default) and not measured
again: a run cut short, Ctrl-C included, writes what it has and is taken up.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import memopt
from benchmarks.kept import Kept
from benchmarks.peers.check import outcome, rounding, verdict
from benchmarks.peers.contests import CONTESTS, Contest, build
from benchmarks.peers.page import Row, joined, page, rows_in, table
from benchmarks.peers.peers import compiled, eager_peers
from benchmarks.same_masks import same_masks
from benchmarks.steps import Step, interleaved, peak_of, ratio
from memopt.api.plan import Plan
from memopt.models.record import KERNELS

STRATEGIES = ("rotor", "rotor-menus")
STORE_ALL = "memopt store-all"
ATEN = ("aten",)
COMPILED = "torch.compile {budget:g}"


def best_plan(firsts: Sequence[Plan], peak_bytes: int) -> Plan | str:
    """The plan of least predicted time for a peak above the resident bytes, or why none; `firsts`:
    the store-all of each kind of kernels."""
    plans, reasons = [], []
    for first, strategy in itertools.product(firsts, STRATEGIES):
        budget = first.resident_bytes + peak_bytes
        try:
            plans.append(
                memopt.plan(first.profiled, budget=budget, strategy=strategy, progress=False)
            )
        except memopt.InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            above = "?" if least is None else f"{(least - first.resident_bytes) / 2**20:.1f} MiB"
            reasons.append(f"{strategy} needs {above}")
    if plans:
        return min(plans, key=lambda plan: plan.step_time_s)
    return "; ".join(reasons)


@dataclass(frozen=True)
class Group:
    """Ways to train one model that were measured together, by name; memopt's at a peer's peak
    under `_ours(peer)`."""

    chosen: dict[str, Plan | str]
    peaks: dict[str, int]
    times: dict[str, list[float]]
    answers: dict[str, str]


def contest_rows(
    contest: Contest,
    rounds: int,
    budgets: tuple[float, ...],
    kernels: Sequence[str] = ATEN,
    limit_s: float = math.inf,
    own_random: bool = False,
) -> list[Row]:
    """Measure one model's peers, then memopt at each of their peaks. After so many seconds no
    further peer is begun."""
    ends = time.monotonic() + limit_s
    firsts = [
        memopt.plan(
            contest.module, contest.inputs, strategy="store-all", kernels=one, progress=False
        )
        for one in kernels
    ]
    store_all = _fastest(firsts).apply(contest.module)
    base: dict[str, Step] = {"eager": contest.step, STORE_ALL: lambda: contest.step(store_all)}
    noise = rounding(contest)
    peers = eager_peers(contest) if tuple(kernels) == ATEN else {}
    rows = []
    if peers:
        group = measured(contest, firsts, base, peers, rounds, noise)
        rows = [_row(contest.name, p, group, ratio(group.times, p, "eager")) for p in peers]
    own = 1.0
    # One after the other: compiled code is kept by function, so that two budgets would share it.
    for budget in sorted(budgets, reverse=True):
        if time.monotonic() > ends:
            print(f"{contest.name}: the limit ends it before torch.compile {budget:g}")
            break
        peer = COMPILED.format(budget=budget)
        step = compiled(contest, budget, own_random=own_random)
        group = measured(contest, firsts, base, {peer: step}, rounds, noise)
        over_eager = ratio(group.times, peer, "eager")
        if tuple(kernels) != ATEN:
            rows.append(_row(contest.name, peer, group, over_eager))
            if budget >= 1:
                rows.append(_store_all_row(contest.name, peer, group, over_eager))
            continue
        own = over_eager if budget >= 1 else own
        rows.append(_row(contest.name, peer, group, over_eager / own, over_eager))
    return rows


def measured(
    contest: Contest,
    firsts: Sequence[Plan],
    base: dict[str, Step],
    peers: dict[str, Step],
    rounds: int,
    noise: float,
) -> Group:
    """Peaks and answers of peers and of memopt at their peaks, and interleaved times of all."""
    device = next(contest.model.parameters()).device
    steps = base | peers
    chosen: dict[str, Plan | str] = {}
    peaks = {name: peak_of(contest.model, step, device) for name, step in steps.items()}
    for peer in peers:
        chosen[peer] = made = best_plan(firsts, peaks[peer])
        if isinstance(made, Plan):
            planned = made.apply(contest.module)
            steps[_ours(peer)] = lambda planned=planned: contest.step(planned)
            peaks[_ours(peer)] = peak_of(contest.model, steps[_ours(peer)], device)
    made_by = {STORE_ALL: _fastest(firsts), **{_ours(p): made for p, made in chosen.items()}}
    answers = {}
    for name, step in steps.items():
        expected = outcome(contest, _eager(contest, made_by.get(name)))
        answers[name] = verdict(expected, outcome(contest, step), noise)
    return Group(chosen, peaks, interleaved(contest.model, steps, rounds, device), answers)


def _fastest(firsts: Sequence[Plan]) -> Plan:
    return min(firsts, key=lambda plan: plan.step_time_s)


def _eager(contest: Contest, made: Plan | str | None) -> Step:
    """Eager's step, whose dropouts drop what the kernels of a plan drop."""
    if not isinstance(made, Plan):
        return contest.step

    def step() -> None:
        with same_masks(made.graph):
            contest.step()

    return step


def _ours(peer: str) -> str:
    return f"memopt at the peak of {peer}"


def _row(
    model: str, peer: str, group: Group, over_own: float, over_eager: float | None = None
) -> Row:
    """A row; `over_own`: over the peer's own store-all, of a compiled one `over_eager` too: fused
    kernels are compared by their overhead."""
    made = group.chosen[peer]
    given = (model, peer, group.peaks[peer], over_own, group.answers[peer])
    if isinstance(made, str):
        nan = float("nan")
        return Row(*given, "-", 0, nan, "", nan, made, over_eager)
    ours = _ours(peer)
    our_over = ratio(group.times, ours, "eager" if over_eager is None else STORE_ALL)
    against = ratio(group.times, ours, peer) if over_eager is None else our_over / over_own
    return Row(
        *given,
        made.strategy.name,
        group.peaks[ours],
        our_over,
        group.answers[ours],
        against,
        over_eager=over_eager,
        kernels=kernels_of(made),
    )


def kernels_of(plan: Plan) -> str:
    """What the operators of a plan of a module run."""
    return "aten" if plan.record is None else plan.record.kernels


def _store_all_row(model: str, peer: str, group: Group, over_eager: float) -> Row:
    """memopt's own store-all beside the compiled one, whatever its peak."""
    return Row(
        model,
        peer,
        group.peaks[peer],
        over_eager,
        group.answers[peer],
        "store-all",
        group.peaks[STORE_ALL],
        ratio(group.times, STORE_ALL, "eager"),
        group.answers[STORE_ALL],
        ratio(group.times, STORE_ALL, peer),
        kernels="compiled",
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    every = list(CONTESTS)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", type=float, nargs="*", default=[1.0, 0.5])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(ATEN))
    parser.add_argument("--own-random", action="store_true", help="torch.compile draws its own")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for each model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, default=Path("out/peers.json"), help="finished rows")
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept so far")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and write after every model; 130 if interrupted."""
    options = parsed()
    torch.set_num_threads(options.threads)
    settings = {
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in ("rounds", "threads", "compile", "kernels")},
        **({"own_random": True} if options.own_random else {}),
    }
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    try:
        for name in kept.missing(options.only, print):
            budgets = tuple(options.compile)
            how = (options.rounds, budgets, options.kernels, options.limit, options.own_random)
            kept.add(name, contest_rows(build(name), *how))
            print(table(kept.rows[name]), flush=True)
            write(kept.ordered(CONTESTS), options)
    except KeyboardInterrupt:
        print(f"interrupted; the same command takes up what {kept.path} keeps")
        return 130
    rows = kept.ordered(CONTESTS)
    write(rows, options)
    overall = statistics.median(row.ours_over_peer for row in rows if not row.reason)
    print(f"\nmedian of memopt / peer over {len(rows)} cells: {overall:.3f}")
    return 0


def write(rows: list[Row], options: argparse.Namespace) -> None:
    """The page of these rows, to --out if there is one: rows of other models that the same command
    measured stay on it."""
    if options.out is None:
        return
    shown = f"--rounds {options.rounds} --threads {options.threads} --compile "
    command = f"python -m benchmarks.peers {shown}" + " ".join(map(str, options.compile))
    if tuple(options.kernels) != ATEN:
        command += " --kernels " + " ".join(options.kernels)
    command += " --own-random" * options.own_random
    options.out.parent.mkdir(parents=True, exist_ok=True)
    old = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    every, before = joined(rows_in(old, command), rows)
    how = (command, options.threads, options.rounds, options.own_random, before)
    options.out.write_text(page(every, *how), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

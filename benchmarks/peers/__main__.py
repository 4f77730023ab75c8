"""Peers' measured peaks and step times, and memopt's best plan at each of these peaks.

    python -m benchmarks.peers [--only NAME ...] [--rounds 7] [--threads 1] [--compile 1.0 0.5]
        [--out FILE] [--resume FILE] [--fresh]

Peaks exclude what is resident (parameters, inputs). All steps of a model are timed interleaved.
Compiled peers run fused kernels: each is compared by its overhead over its own store-all
(`torch.compile` with budget 1.0), memopt's by its overhead over memopt's store-all.

A finished model's rows are kept in a JSON file (--resume; in out/ by default) and not measured
again: a run cut short, Ctrl-C included, writes what it has and is taken up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import memopt
from benchmarks.kept import Kept
from benchmarks.peers.check import outcome, rounding, verdict
from benchmarks.peers.contests import CONTESTS, Contest, build
from benchmarks.peers.peers import compiled, eager_peers
from benchmarks.steps import Step, interleaved, peak_of, ratio
from memopt.api.plan import Plan

STRATEGIES = ("rotor", "rotor-menus")
STORE_ALL = "memopt store-all"
COMPILED = "torch.compile {budget:g}"


@dataclass(frozen=True)
class Row:
    """A peer beside memopt at its peak. Bytes exclude what is resident; ratios are medians."""

    model: str
    peer: str
    peak_bytes: int
    over_own: float
    answers: str
    strategy: str
    our_peak_bytes: int
    our_over_eager: float
    our_answers: str
    ours_over_peer: float
    reason: str = ""
    over_eager: float | None = None


def best_plan(first: Plan, peak_bytes: int) -> Plan | str:
    """The plan of least predicted time for a peak above the resident bytes, or why none."""
    budget = first.resident_bytes + peak_bytes
    plans, reasons = [], []
    for strategy in STRATEGIES:
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


def contest_rows(contest: Contest, rounds: int, budgets: tuple[float, ...]) -> list[Row]:
    """Measure one model's peers, then memopt at each of their peaks."""
    first = memopt.plan(contest.module, contest.inputs, strategy="store-all", progress=False)
    store_all = first.apply(contest.module)
    base: dict[str, Step] = {"eager": contest.step, STORE_ALL: lambda: contest.step(store_all)}
    noise = rounding(contest)
    peers = eager_peers(contest)
    group = measured(contest, first, base, peers, rounds, noise)
    rows = [_row(contest.name, peer, group, ratio(group.times, peer, "eager")) for peer in peers]
    own = 1.0
    # One after the other: compiled code is kept by function, so that two budgets would share it.
    for budget in sorted(budgets, reverse=True):
        peer = COMPILED.format(budget=budget)
        group = measured(contest, first, base, {peer: compiled(contest, budget)}, rounds, noise)
        over_eager = ratio(group.times, peer, "eager")
        own = over_eager if budget >= 1 else own
        rows.append(_row(contest.name, peer, group, over_eager / own, over_eager))
    return rows


def measured(
    contest: Contest,
    first: Plan,
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
        chosen[peer] = made = best_plan(first, peaks[peer])
        if isinstance(made, Plan):
            planned = made.apply(contest.module)
            steps[_ours(peer)] = lambda planned=planned: contest.step(planned)
            peaks[_ours(peer)] = peak_of(contest.model, steps[_ours(peer)], device)
    expected = outcome(contest, contest.step)
    answers = {n: verdict(expected, outcome(contest, step), noise) for n, step in steps.items()}
    return Group(chosen, peaks, interleaved(contest.model, steps, rounds, device), answers)


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
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | peer | peak, MiB | x its store-all | answers | memopt | peak, MiB "
        "| x its store-all | answers | memopt / peer |",
        "|---|---|---:|---:|---|---|---:|---:|---|---:|",
    ]
    for row in rows:
        ours = (
            f"{row.strategy} | {row.our_peak_bytes / 2**20:.1f} | {row.our_over_eager:.3f} | "
            f"{row.our_answers} | {row.ours_over_peer:.3f}"
            if not row.reason
            else f"{row.reason} | | | | "
        )
        lines.append(
            f"| {row.model} | {row.peer} | {row.peak_bytes / 2**20:.1f} "
            f"| {row.over_own:.3f}{fused(row)} | {row.answers} | {ours} |"
        )
    return "\n".join(lines)


def fused(row: Row) -> str:
    """A compiled step's time, of eager's."""
    return "" if row.over_eager is None else f" ({row.over_eager:.2f} of eager)"


def page(rows: list[Row], command: str, threads: int, rounds: int) -> str:
    """The results page."""
    won = [row for row in rows if row.ours_over_peer < 1]
    lost = [
        f"- {row.model} against {row.peer}: {row.reason or f'{row.ours_over_peer:.3f}'}"
        for row in rows
        if not row.ours_over_peer < 1
    ]
    return "\n".join(
        [
            "# memopt beside what users would pick instead",
            "",
            f"`{command}`: torch {torch.__version__}, CPU, {threads} threads, {rounds} interleaved "
            "rounds. Peaks are above what is resident. Times are medians of paired ratios: to "
            "eager for eager peers, to its own store-all for `torch.compile` (memopt's to "
            "memopt's), which draws its random numbers as eager does (`fallback_random`). "
            '"equal": gradients and buffers are eager\'s bit for bit; "close": within '
            "1e-3 of each tensor's largest value, gradients also ten times what one rounding of "
            "the parameters, or eager's kernels without oneDNN, change in eager itself.",
            "",
            f"memopt is faster at the peer's peak in {len(won)} of {len(rows)} cells. Not in:",
            "",
            *lost,
            "",
            "A compiled store-all has no overhead by definition, and its fused kernels save less "
            "than separate ones do: where its peak is below that of memopt's store-all, memopt "
            "recomputes to meet it. A few hundredths are within the noise of the machine.",
            "",
            table(rows),
            "",
        ]
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    every = list(CONTESTS)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", type=float, nargs="*", default=[1.0, 0.5])
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
        **{name: getattr(options, name) for name in ("rounds", "threads", "compile")},
    }
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    try:
        for name in kept.missing(options.only, print):
            kept.add(name, contest_rows(build(name), options.rounds, tuple(options.compile)))
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
    """The page of these rows, to --out if there is one."""
    if options.out is None:
        return
    shown = f"--rounds {options.rounds} --threads {options.threads} --compile "
    command = f"python -m benchmarks.peers {shown}" + " ".join(map(str, options.compile))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(rows, command, options.threads, options.rounds), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

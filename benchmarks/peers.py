"""Peers' measured peaks and step times, and memopt's best plan at each of these peaks.

Peaks exclude what is resident (parameters, inputs). All steps of a model are timed interleaved.
Compiled peers run fused kernels: where memopt has ATen's alone (--kernels aten), each is compared
by its overhead over its own store-all (`torch.compile` with budget 1.0), memopt's by its overhead
over memopt's store-all. With other kernels too, memopt's plan is the fastest of all, and step times
are compared as they are, in units of eager's. `torch.compile` draws random numbers as eager does,
which takes time; with --own-random, as it does by default.

Compiled kernels draw their own random numbers: their answers are compared with those of an eager
step whose dropouts drop the same elements.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memopt
from benchmarks.runner import Benchmark
from benchmarks.shapes import CONTESTS, Contest, build
from benchmarks.steps import Step, clear, difference, gradients, peak_of
from benchmarks.table import interleaved, joined, mib, ratio, table
from memopt.api.plan import Plan
from tests.kernels.compiled.same_masks import same_masks

STRATEGIES = ("rotor", "rotor-menus")
STORE_ALL = "memopt store-all"
ATEN = ("aten",)
COMPILED = "torch.compile {budget:g}"


def per_block(contest: Contest) -> Step:
    """`torch.utils.checkpoint` around every block."""

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def step() -> None:
        with ExitStack() as stack:
            for block in contest.blocks:
                forward = checkpointed(block.forward)
                stack.enter_context(mock.patch.object(block, "forward", forward))
            contest.step()

    return step


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Take away flags, functions and hooks that modules get meanwhile: a plan's guard sees them."""
    before = [(vars(m), dict(vars(m)), m._forward_hooks.copy()) for m in model.modules()]
    try:
        yield
    finally:
        for now, then, hooks in before:
            now.clear()
            now.update(then)
            now["_forward_hooks"].clear()
            now["_forward_hooks"].update(hooks)


def hugging_face(contest: Contest) -> Step:
    """`gradient_checkpointing_enable`."""
    model: Any = contest.model

    def step() -> None:
        with _put_back(model):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            contest.step()

    return step


def segmented(contest: Contest, count: int) -> Step:
    """`checkpoint_sequential` with `count` segments."""
    (images,) = contest.inputs

    def step() -> None:
        torch.manual_seed(0)
        output = checkpoint_sequential(contest.sequence, count, images, use_reentrant=False)
        contest.module.loss(output).backward()

    return step


def compiled(contest: Contest, budget: float, *, own_random: bool = False) -> Step:
    """`torch.compile` with an activation memory budget; 1.0 stores all. What was compiled before
    is forgotten; random numbers are drawn as eager draws them, or as Inductor does by default."""
    torch._dynamo.reset()
    fast = torch.compile(contest.module, fullgraph=True, dynamic=False)

    def step() -> None:
        # Read when the step is first compiled; later calls find the compiled code.
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            torch._inductor.config.patch(fallback_random=not own_random),
        ):
            contest.step(fast)

    return step


def eager_peers(contest: Contest, segments: Sequence[int]) -> dict[str, Step]:
    """Give the peers that run eager kernels, by name."""
    peers: dict[str, Step] = {"checkpoint per block": per_block(contest)}
    if hasattr(contest.model, "gradient_checkpointing_enable"):
        peers["Hugging Face checkpointing"] = hugging_face(contest)
    if contest.sequence is not None:
        for count in segments:
            peers[f"checkpoint_sequential {count}"] = segmented(contest, count)
    return peers


Outcome = dict[str, dict[str, Tensor]]
"""Gradients and buffers after one step."""


def outcome(contest: Contest, step: Step) -> Outcome:
    """One step's gradients and buffers; the model's state is put back."""
    state = copy.deepcopy(contest.model.state_dict())
    clear(contest.model)
    step()
    found = {
        "gradients": gradients(contest.model),
        "buffers": {n: b.clone() for n, b in contest.model.named_buffers()},
    }
    clear(contest.model)
    contest.model.load_state_dict(state)
    return found


def rounding(contest: Contest) -> float:
    """How far eager's own gradients move when every parameter is rounded anew, or when its other
    kernels run (CPU: those without oneDNN), in the units of `verdict`: what no other order of
    additions can be blamed for."""
    expected = outcome(contest, contest.step)

    def perturbed() -> None:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in contest.model.parameters():
                signs = torch.randint_like(parameter, 0, 2) * 2 - 1
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps / 2 * signs)
        contest.step()

    def other_kernels() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            contest.step()

    found = (outcome(contest, step) for step in (perturbed, other_kernels))
    return max(difference(expected["gradients"], one["gradients"]) for one in found)


def verdict(expected: Outcome, found: Outcome, noise: float = 0.0) -> str:
    """ "equal" bit for bit; "close" within 1e-3 of each tensor's largest value (gradients: or ten
    times the model's `rounding`); or what is wrong."""
    wrong = []
    exact = True
    for name, ours in expected.items():
        theirs, tolerance = found[name], max(1e-3, 10 * noise * (name == "gradients"))
        if ours.keys() != theirs.keys():
            wrong.append(f"{name} missing")
            continue
        exact &= all(torch.equal(ours[key], theirs[key]) for key in ours)
        worst = difference(ours, theirs)
        if not worst <= tolerance:
            wrong.append(f"{name} off by {worst:.2g}")
    return ", ".join(wrong) or ("equal" if exact else "close")


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
    kernels: str = "aten"


def best_plan(firsts: Sequence[Plan], peak_bytes: int) -> Plan | str:
    """Find the plan of least predicted time for a peak above the resident bytes, or why none;
    `firsts`: the store-all of each kind of kernels."""
    plans, reasons = [], []
    for first, strategy in itertools.product(firsts, STRATEGIES):
        how = {"budget": first.resident_bytes + peak_bytes, "progress": False}
        try:
            plans.append(memopt.plan(first.profiled, strategy=strategy, **how))
        except memopt.InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            above = "?" if least is None else f"{(least - first.resident_bytes) / 2**20:.1f} MiB"
            reasons.append(f"{strategy} needs {above}")
    return _fastest(plans) if plans else "; ".join(reasons)


@dataclass(frozen=True)
class Group:
    """Ways to train one model that were measured together, by name; memopt's at a peer's peak
    under `_ours(peer)`."""

    chosen: dict[str, Plan | str]
    peaks: dict[str, int]
    times: dict[str, list[float]]
    answers: dict[str, str]


def contest_rows(given: Any, name: str) -> list[Row]:
    """Measure one model's peers, then memopt at each of their peaks."""
    contest, kernels = build(name), tuple(given.kernels)
    how = {"strategy": "store-all", "progress": False}
    firsts = [memopt.plan(contest.module, contest.inputs, kernels=one, **how) for one in kernels]
    store_all = _fastest(firsts).apply(contest.module)
    base: dict[str, Step] = {"eager": contest.step, STORE_ALL: lambda: contest.step(store_all)}
    noise = rounding(contest)
    peers = eager_peers(contest, given.segments) if kernels == ATEN else {}
    rows = []
    if peers:
        group = measured(contest, firsts, base, peers, given.rounds, noise)
        rows = [_row(contest.name, p, group, ratio(group.times, p, "eager")) for p in peers]
    own = 1.0
    # One after the other: compiled code is kept by function, so that two budgets would share it.
    for budget in sorted(given.compile, reverse=True):
        peer = COMPILED.format(budget=budget)
        step = compiled(contest, budget, own_random=given.own_random)
        group = measured(contest, firsts, base, {peer: step}, given.rounds, noise)
        over_eager = ratio(group.times, peer, "eager")
        if kernels != ATEN:
            rows.append(_row(contest.name, peer, group, over_eager))
            if budget >= 1:
                rows.append(_store_all_row(rows[-1], group))
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
    """Measure peaks and answers of peers and of memopt at their peaks, and times of all in turn."""
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
    """Make eager's step, whose dropouts drop what the kernels of a plan drop."""
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
    """Make a row; `over_own`: over the peer's own store-all, of a compiled one `over_eager` too:
    fused kernels are compared by their overhead."""
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
        kernels="aten" if made.record is None else made.record.kernels,
    )


def _store_all_row(beside: Row, group: Group) -> Row:
    """Set memopt's own store-all, whatever its peak, in the place of a row's plan."""
    return replace(
        beside,
        strategy="store-all",
        our_peak_bytes=group.peaks[STORE_ALL],
        our_over_eager=ratio(group.times, STORE_ALL, "eager"),
        our_answers=group.answers[STORE_ALL],
        ours_over_peer=ratio(group.times, STORE_ALL, beside.peer),
        reason="",
        kernels="compiled",
    )


def _named(row: Row) -> str:
    return row.strategy if row.kernels == "aten" else f"{row.strategy}, {row.kernels}"


def _line(row: Row) -> str:
    fused = "" if row.over_eager is None else f" ({row.over_eager:.2f} of eager)"
    ours = f"{row.reason} |  |  |  | "
    if not row.reason:
        ours = (
            f"{_named(row)} | {mib(row.our_peak_bytes)} | {row.our_over_eager:.3f} | "
            f"{row.our_answers} | {row.ours_over_peer:.3f}"
        )
    return (
        f"{row.model} | {row.peer} | {mib(row.peak_bytes)} | {row.over_own:.3f}{fused} | "
        f"{row.answers} | {ours}"
    )


def _blocks(rows: list[Row], given: Any) -> str:
    unit = "× its own" if tuple(given.kernels) == ATEN else "× eager"
    won = [row.ours_over_peer for row in rows if row.ours_over_peer < 1]
    lost = [
        f"- {row.model} against {row.peer}: "
        + (row.reason or f"{_named(row)}, {row.ours_over_peer:.3f}")
        for row in rows
        if not row.ours_over_peer < 1
    ]
    overall = statistics.median([row.ours_over_peer for row in rows if not row.reason] or [1.0])
    return joined(
        f"memopt is faster at the peer's peak in {len(won)} of {len(rows)} cells; median of its "
        f"time over the peer's: {overall:.3f}." + " Not in:" * bool(lost),
        "\n".join(lost),
        table(
            f"model | peer | peak, MiB | {unit} | answers | memopt | peak, MiB | {unit} | answers "
            "| memopt / peer",
            map(_line, rows),
        ),
    )


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda given: {name: (name,) for name in CONTESTS if name in given.models},
    measure=contest_rows,
    blocks=_blocks,
    selects=("models",),
    options={
        "models": ("resnet50", "vit", "unet", "gpt2", "bert", "llama"),
        "rounds": 7,
        "compile": (1.0, 0.5),
        "segments": (2, 4, 8),
        "kernels": ATEN,
        "own_random": False,
    },
)

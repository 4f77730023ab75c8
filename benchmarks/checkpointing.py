"""memopt's Rotor against per-block checkpointing, at the same measured peak, interleaved.

    .venv/bin/python -m benchmarks.checkpointing [--rounds 7] [--threads 2] [--only gpt2|resnet50]

GPT-2 (12 layers, d = 256, batch 4 x 128) against Hugging Face's gradient checkpointing, and
ResNet-50 against the best `checkpoint_sequential`. Peaks exclude what is resident.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping

import torch

import memopt
from benchmarks.peers.contests import Contest, gpt2, made, resnet50
from benchmarks.peers.peers import hugging_face, segmented
from benchmarks.steps import Step, interleaved, peak_of, ratio
from memopt.api.plan import Plan

CPU = torch.device("cpu")


def contests(only: str | None) -> Iterator[tuple[Contest, dict[str, Step]]]:
    """The models, each with the ways to train it in less memory that it is compared with."""
    if only != "resnet50":
        for vocabulary in (1000, 50257):
            contest = made(lambda vocabulary=vocabulary: gpt2(vocabulary))
            yield contest, {"Hugging Face per block": hugging_face(contest)}
    if only != "gpt2":
        contest = made(resnet50)
        yield contest, {f"checkpoint_sequential {k}": segmented(contest, k) for k in range(2, 9)}


def plan_at(first: Plan, contest: Contest, peak_bytes: int) -> Step:
    """Steps under Rotor's plan for a peak of `peak_bytes` above the resident bytes."""
    budget = first.resident_bytes + peak_bytes
    plan = memopt.plan(first.profiled, budget=budget, strategy="rotor", progress=False)
    planned = plan.apply(contest.module)
    return lambda: contest.step(planned)


def main() -> None:
    """Print one table per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("gpt2", "resnet50"), default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for contest, peers in contests(options.only):
        report(contest, peers, options.rounds)


def report(contest: Contest, peers: Mapping[str, Step], rounds: int) -> None:
    """Plan, measure and print one contest."""
    first = memopt.plan(contest.module, contest.inputs, strategy="store-all", progress=False)
    store_all = first.apply(contest.module)
    steps: dict[str, Step] = {"eager": contest.step}
    steps["memopt store-all"] = lambda: contest.step(store_all)
    for peer, step in peers.items():
        steps[peer] = step
        peak = peak_of(contest.module, step, CPU)
        try:
            planned = plan_at(first, contest, peak)
        except memopt.InfeasibleBudgetError as error:
            print(f"{peer}: {error}")
            continue
        steps[f"memopt at the peak of {peer}"] = planned
    peaks = {name: peak_of(contest.module, step, CPU) for name, step in steps.items()}
    times = interleaved(contest.module, steps, rounds, CPU)
    print(f"\n{contest.name} ({torch.get_num_threads()} threads, {rounds} rounds)")
    print(f"{'':46} {'peak MiB':>9} {'of eager':>8} {'step s':>8} {'x eager':>8}")
    for name in steps:
        median = statistics.median(times[name])
        print(
            f"{name:46} {peaks[name] / 2**20:9.1f} {peaks[name] / peaks['eager']:8.3f} "
            f"{median:8.4f} {ratio(times, name, 'eager'):8.3f}"
        )
    for peer in peers:
        ours = f"memopt at the peak of {peer}"
        if ours in steps:
            print(f"{ours}: {ratio(times, ours, peer):.3f} x its time")


if __name__ == "__main__":
    main()

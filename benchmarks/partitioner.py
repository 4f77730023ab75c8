"""memopt's choice inside Inductor's own pipeline, beside torch's, at the same measured peaks.

    python -m benchmarks.partitioner [--only NAME ...] [--budgets 0.9 0.7 0.5 0.3] [--rounds 7]
        [--strategy rotor] [--out FILE]

For each `activation_memory_budget` of torch the peak of its step is measured; `memopt.partitioner`
is then given that peak as its budget. Both steps run in turns on one thread.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import memopt
from benchmarks.peers.contests import CONTESTS, Contest, build
from benchmarks.peers.peers import compiled
from benchmarks.steps import interleaved, peak_of, ratio
from memopt.errors import MemoptError
from memopt.models.device import Device

CPU = torch.device("cpu")
HEAD = (
    "| model | activation_memory_budget | its peak | memopt's predicted peak | memopt's measured "
    "peak | memopt's time / torch's | rounds |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


def row(contest: Contest, share: float, strategy: str, device: Device, rounds: int) -> str:
    """One budget: torch's step, and memopt's within its measured peak."""
    theirs = compiled(contest, share)
    module = contest.module
    peak = peak_of(module, theirs, CPU)
    tensors = [*module.parameters(), *module.buffers()]
    resident = sum(t.untyped_storage().nbytes() for t in tensors) + _input_bytes(contest)
    begin = f"| {contest.name} | {share:g} | {(resident + peak) / 2**20:.1f} MiB |"
    partitioner = memopt.partitioner(resident + peak, strategy, device)
    try:
        with torch._inductor.config.patch(fallback_random=True):
            run = partitioner.compile(module, contest.inputs)
    except MemoptError as error:
        return f"{begin} - | - | {error} | - |"
    report = partitioner.report
    assert report is not None

    def ours() -> None:
        contest.step(run)

    times = interleaved(module, {"torch": theirs, "memopt": ours}, rounds, CPU)
    return (
        f"{begin} {report.predicted_peak_bytes / 2**20:.1f} MiB | "
        f"{report.measured_peak_bytes / 2**20:.1f} MiB | "
        f"{ratio(times, 'memopt', 'torch'):.3f} | {report.rounds} |"
    )


def _input_bytes(contest: Contest) -> int:
    given = contest.inputs.values() if isinstance(contest.inputs, dict) else contest.inputs
    return sum(t.untyped_storage().nbytes() for t in given if isinstance(t, torch.Tensor))


def main() -> None:
    """Measure, print, and write the page after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTS), default=("gpt2", "resnet50"))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.9, 0.7, 0.5, 0.3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategy", default="rotor")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = memopt.measure_device("cpu")
    lines = list(HEAD)
    print("\n".join(HEAD), flush=True)
    for name in options.only:
        for share in options.budgets:
            contest = build(name)
            lines.append(row(contest, share, options.strategy, device, options.rounds))
            print(lines[-1], flush=True)
            if options.out:
                text = page(lines, options.rounds, options.strategy)
                options.out.write_text(text, encoding="utf-8")


def page(lines: list[str], rounds: int, strategy: str) -> str:
    """The results page, of the table's lines."""
    return "\n".join(
        [
            "# Inside Inductor's own pipeline",
            "",
            f"`python -m benchmarks.partitioner --rounds {rounds} --strategy {strategy}`: "
            "`memopt.partitioner` beside `activation_memory_budget` of `torch.compile`, whose "
            "measured peak is memopt's budget. Peaks include parameters and inputs; times are "
            f"medians of {rounds} paired ratios, both steps in turns; CPU, one thread, torch "
            f"{torch.__version__}. `rounds`: how many choices were compiled and measured until "
            "one kept the budget.",
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()

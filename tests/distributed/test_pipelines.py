"""What a pipeline's schedule keeps beside a stage's call, charged from its first call on."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt.executor.pipeline_stages import in_flight
from memopt.models.charges import Charges
from memopt.pricing.memory import MemoryUse, metered
from tests.distributed import processes

CALLS = 4
ROWS, WIDTH = 4, 16
"""Of a micro-batch."""


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("FFFBBB", (2, 0)),
        ("FBFBFB", (0, 0)),
        ("FFBFBB", (1, 0)),
        ("FFIFIWIWW", (2, 2)),
        ("", (0, 0)),
    ],
)
def test_micro_batches_in_flight(order: str, expected: tuple[int, int]) -> None:
    assert in_flight(order) == expected


def trained(
    schedule: Any, stages: int, plan: bool, **step: Any
) -> tuple[list[Tensor], list[Any], list[bool]]:
    """Train a pipeline of one rank.

    Returns:
        Losses and gradients; the stages' modules; whether each output of the last stage but the
        last is gone when the next one is made.
    """
    torch.manual_seed(0)
    modules: list[Any] = [
        nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(stages)
    ]
    for module in modules if plan else ():
        memopt.wrap(module, "min", "rotor", progress=False)
    gone: list[bool] = []
    outputs: list[StorageWeakRef] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        gone.extend(one.expired() for one in outputs)
        outputs[:] = [StorageWeakRef(output.untyped_storage())]  # type: ignore[no-untyped-call]
        return (output - target).square().mean()

    made = [PipelineStage(one, i, stages, torch.device("cpu")) for i, one in enumerate(modules)]
    running = schedule(made if stages > 1 else made[0], CALLS, loss_fn=loss)
    found: list[Tensor] = []
    for _ in range(2):
        outputs.clear()
        losses: list[Tensor] = []
        target = torch.zeros(ROWS * CALLS, WIDTH)
        running.step(torch.randn(ROWS * CALLS, WIDTH), target=target, losses=losses, **step)
        found += losses
    return [*found, *(p.grad for one in modules for p in one.parameters())], modules, gone


PIPELINES: list[tuple[Any, int, dict[str, Any]]] = [
    (ScheduleGPipe, 1, {}),
    (Schedule1F1B, 1, {}),
    (Schedule1F1B, 1, {"return_outputs": False}),
    (ScheduleInterleaved1F1B, 2, {}),
]


def of_each(rank: int, ranks: int) -> list[list[tuple[Charges, int]]]:
    """Of each pipeline's stages the charges that are known beforehand, and how many plans."""
    found = []
    for schedule, stages, step in PIPELINES:
        expected, _, let_go = trained(schedule, stages, False, **step)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".* more than its budget")
            got, modules, gone = trained(schedule, stages, True, **step)
        assert all(map(torch.equal, got, expected))
        assert gone == let_go
        around = [(one.memopt.around.certain(), len(one.memopt.plans)) for one in modules]
        found.append(around)
    return found


def test_what_a_schedule_keeps_is_charged_from_the_first_call(tmp_path: Path) -> None:
    gpipe, one_by_one, dropping, interleaved = processes.results(
        processes.run(of_each, 1, tmp_path)
    )[0]
    losses_bytes = 8 * CALLS
    received_bytes = 4 * ROWS * WIDTH * CALLS
    dropped = Charges(bucket_bytes=losses_bytes)
    last = replace(dropped, joined_calls=CALLS)
    # One plan, with room for gradients from the first micro-batch on.
    assert gpipe == [(replace(last, waiting_calls=CALLS - 1), 1)]
    assert one_by_one == [(replace(last, output_calls=CALLS - 1), 1)]
    assert dropping == [(dropped, 1)]
    received = replace(last, bucket_bytes=losses_bytes + received_bytes, output_calls=CALLS - 1)
    assert interleaved == [(Charges(waiting_calls=1, output_calls=CALLS - 1), 1), (received, 1)]


def joining(rank: int, ranks: int, schedule: Any, holds: bool) -> int:
    """The bytes of a step's peak above the budget, where outputs are wide; `holds`: the loop holds
    those of the step before."""
    calls = 12
    module: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1024))
    memopt.wrap(module, "min", "rotor", progress=False)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    running = schedule(stage, calls, loss_fn=lambda output, _: output.square().mean())
    given, target = torch.randn(64 * calls, WIDTH), torch.zeros(64 * calls, 1)
    for step in range(6):
        module.zero_grad()
        with metered(torch.device("cpu")) if step == 5 else nullcontext(MemoryUse()) as use:
            output = running.step(given, target=target)
        held = output if holds else None
        del output
    # Their memory is there when the metered step begins.
    held_bytes = sum(one.nbytes for one in (*module.parameters(), held) if one is not None)
    return int(use.peak_bytes + held_bytes - module.memopt.plans[-1].budget)


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
@pytest.mark.parametrize("holds", [False, True])
def test_joined_outputs_are_charged(tmp_path: Path, schedule: Any, holds: bool) -> None:
    found = processes.run(joining, 1, tmp_path, schedule, holds)
    (over_bytes,) = processes.results(found)
    # A page of scalars more or less.
    assert -(2**16) < over_bytes <= 0

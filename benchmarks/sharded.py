"""memopt.shard under plans beside FSDP2, with and without checkpointing of every block.

    python -m benchmarks.sharded [--models gpt2 resnet50] [--ranks 2] [--rounds 10]
                                 [--out docs/results/sharded.md]

A model is trained by gloo processes of one thread each, on this machine: by FSDP2
(`fully_shard` on each block and the root), by FSDP2 with torch's checkpointing of each block, and
by `memopt.shard` under three plans: one that keeps everything, one within the peak of checkpointed
FSDP2, and one within half of FSDP2's peak. Every round runs one step of each, so that what
disturbs the machine disturbs all alike; a step's time is the slowest rank's, and its peak the
largest rank's: the shards, and what the step allocates at most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import memopt
from memopt.errors import InfeasibleBudgetError
from memopt.profiler.memory import metered
from tests.distributed.gloo import in_one_thread
from tests.zoo import torchvision_shim  # noqa: F401 (before torchvision and transformers)

import torchvision  # isort: skip
from transformers import GPT2Config, GPT2LMHeadModel  # isort: skip

VOCABULARY = 2048
MIB = 2**20


@dataclass(frozen=True)
class Subject:
    """A model that is trained.

    Attributes:
        text: what it is, and the batch of a rank.
        build: makes it; parameters are not tied, so that FSDP2 sums gradients in the same order.
        blocks: where its blocks are: modules that have them as children.
        inputs: draws the call of a rank.
    """

    text: str
    build: Callable[[], Any]
    blocks: Callable[[Any], list[nn.Module]]
    inputs: Callable[[], dict[str, torch.Tensor]]


def gpt2() -> Any:
    """Six layers of 256, without dropout."""
    config = GPT2Config(
        n_layer=6,
        n_embd=256,
        n_head=8,
        vocab_size=VOCABULARY,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def words() -> dict[str, torch.Tensor]:
    """Eight rows of 128 words, which are the labels, too."""
    ids = torch.randint(0, VOCABULARY, (8, 128))
    return {"input_ids": ids, "labels": ids}


SUBJECTS = {
    "gpt2": Subject(
        "a GPT-2 of 6 layers of 256, 8 x 128 tokens",
        gpt2,
        lambda model: [model.transformer.h],
        words,
    ),
    "resnet50": Subject(
        "torchvision's ResNet-50, 8 images of 96 x 96",
        torchvision.models.resnet50,
        lambda model: [model.layer1, model.layer2, model.layer3, model.layer4],
        lambda: {"x": torch.randn(8, 3, 96, 96)},
    ),
}


def fsdp(subject: Subject, mesh: DeviceMesh, checkpointed: bool) -> nn.Module:
    """The model under FSDP2."""
    model = seeded(subject)
    for blocks in subject.blocks(model):
        for name, block in blocks.named_children():
            if checkpointed:
                setattr(blocks, name, checkpoint_wrapper(block))  # type: ignore[no-untyped-call]
            fully_shard(blocks.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: nn.Module = model
    return found


def seeded(subject: Subject) -> Any:
    """The model with the same parameters on all ranks."""
    torch.manual_seed(0)
    return subject.build()


def planned(subject: Subject, mesh: DeviceMesh, budget: Any) -> nn.Module:
    """The model under memopt.shard and a plan."""
    model: nn.Module = memopt.shard(seeded(subject), mesh)
    return memopt.wrap(model, budget, progress=False)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


class Step:
    """Training steps of one model on one batch."""

    def __init__(self, model: nn.Module, subject: Subject) -> None:
        self._model = model
        torch.manual_seed(torch.distributed.get_rank())
        self._inputs = subject.inputs()

    def __call__(self) -> None:
        output = self._model(**self._inputs)
        loss = output.loss if "labels" in self._inputs else output.square().mean()
        loss.backward()
        self._model.zero_grad()

    def seconds(self) -> float:
        """Of one step, on the slowest rank."""
        torch.distributed.barrier()
        begin = time.perf_counter()
        self()
        return slowest(time.perf_counter() - begin)

    def peak_bytes(self) -> int:
        """On the rank where it is largest: the shards, and what a step allocates."""
        self()
        own = 0
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            own += local.untyped_storage().nbytes()
        found = []
        for _ in range(3):  # threads of the group may free late what a collective used
            torch.distributed.barrier()
            with metered(torch.device("cpu")) as use:
                self()
            found.append(slowest(own + use.peak_bytes))
        return int(min(found))


def measure(rank: int, ranks: int, store: str, folder: str, name: str, rounds: int) -> None:
    """One rank's part; rank 0 writes the table."""
    subject = SUBJECTS[name]
    torch.set_num_threads(1)
    in_one_thread()
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    notes: list[str] = []

    def add(name: str, make: Callable[[], nn.Module]) -> None:
        try:
            steps[name] = Step(make(), subject)
            peaks[name] = steps[name].peak_bytes()
        except InfeasibleBudgetError as error:
            steps.pop(name, None)
            notes.append(f"{name}: {error}")
        if rank == 0:
            print(f"{name}: {peaks.get(name, 0) / MIB:.1f} MiB", flush=True)

    add("FSDP2", lambda: fsdp(subject, mesh, False))
    add("plan, keeping everything", lambda: planned(subject, mesh, None))
    add("FSDP2, blocks checkpointed", lambda: fsdp(subject, mesh, True))
    within = peaks["FSDP2, blocks checkpointed"]
    add("plan within that peak", lambda: planned(subject, mesh, within))
    add("plan within half of FSDP2's", lambda: planned(subject, mesh, peaks["FSDP2"] // 2))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            seconds = step.seconds()
            times[name] += [seconds] if number else []
        if rank == 0:
            print(f"round {number} of {rounds}", flush=True)
    if rank == 0:
        text = table(subject, ranks, rounds, times, peaks, notes)
        Path(folder, "table.md").write_text(text, encoding="utf-8")
    torch.distributed.destroy_process_group()


def table(
    subject: Subject,
    ranks: int,
    rounds: int,
    times: dict[str, list[float]],
    peaks: dict[str, int],
    notes: list[str],
) -> str:
    """The measured figures of one model."""
    first = times["FSDP2"]
    lines = [
        f"## {subject.text[0].upper()}{subject.text[1:]} on each of {ranks} ranks",
        "",
        "| | peak of a rank, MiB | step, ms | ratio to FSDP2 |",
        "|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
        median_ms = 1e3 * statistics.median(seconds)
        lines.append(f"| {name} | {peaks[name] / MIB:.1f} | {median_ms:.0f} | {ratio:.3f} |")
    return "\n".join([*lines, "", *notes, ""]).rstrip() + "\n"


def page(options: argparse.Namespace) -> str:
    """All models, one after the other."""
    names = " ".join(options.models)
    parts = [
        "# Sharded steps beside FSDP2\n",
        f"`python -m benchmarks.sharded --models {names} --ranks {options.ranks} --rounds "
        f"{options.rounds}`: gloo processes of one thread; torch {torch.__version__}. Medians of "
        f"{options.rounds} interleaved rounds; the ratio is the median of each round's.\n",
    ]
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            given = (options.ranks, f"{folder}/store", folder, name, options.rounds)
            torch.multiprocessing.start_processes(
                measure, given, nprocs=options.ranks, start_method="spawn"
            )
            parts.append(Path(folder, "table.md").read_text(encoding="utf-8"))
    return "\n".join(parts)


def main() -> int:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the page there; else print it")
    options = parser.parse_args()
    text = page(options)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

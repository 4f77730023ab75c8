"""memopt.shard under plans beside FSDP2, with and without checkpointing of every block.

    python -m benchmarks.sharded [--ranks 2] [--layers 6] [--width 256] [--rounds 10]
                                 [--out docs/results/sharded.md]

A GPT-2 without dropout is trained by gloo processes of one thread each, on this machine: by FSDP2
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
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

from transformers import GPT2Config, GPT2LMHeadModel  # isort: skip

BATCH, TOKENS, VOCABULARY = 8, 128, 2048
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """How large the model is."""

    layers: int
    width: int


def gpt2(size: Size) -> Any:
    """The model; its embeddings are not tied, so that FSDP2 sums gradients in the same order."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.width // 32,
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def fsdp(size: Size, mesh: DeviceMesh, checkpointed: bool) -> nn.Module:
    """The model under FSDP2."""
    model = gpt2(size)
    for i, block in enumerate(model.transformer.h):
        if checkpointed:
            model.transformer.h[i] = checkpoint_wrapper(block)  # type: ignore[no-untyped-call]
        fully_shard(model.transformer.h[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: nn.Module = model
    return found


def planned(size: Size, mesh: DeviceMesh, budget: Any) -> nn.Module:
    """The model under memopt.shard and a plan."""
    model: nn.Module = memopt.shard(gpt2(size), mesh)
    return memopt.wrap(model, budget, progress=False)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


class Step:
    """Training steps of one model on one batch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        torch.manual_seed(torch.distributed.get_rank())
        self._ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS))

    def __call__(self) -> None:
        output = self._model(input_ids=self._ids, labels=self._ids)
        output.loss.backward()
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


def measure(rank: int, ranks: int, store: str, folder: str, size: Size, rounds: int) -> None:
    """One rank's part; rank 0 writes the table."""
    torch.set_num_threads(1)
    in_one_thread()
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    notes: list[str] = []

    def add(name: str, make: Callable[[], nn.Module]) -> None:
        try:
            steps[name] = Step(make())
            peaks[name] = steps[name].peak_bytes()
        except InfeasibleBudgetError as error:
            steps.pop(name, None)
            notes.append(f"{name}: {error}")
        if rank == 0:
            print(f"{name}: {peaks.get(name, 0) / MIB:.1f} MiB", flush=True)

    add("FSDP2", lambda: fsdp(size, mesh, False))
    add("plan, keeping everything", lambda: planned(size, mesh, None))
    add("FSDP2, blocks checkpointed", lambda: fsdp(size, mesh, True))
    within = peaks["FSDP2, blocks checkpointed"]
    add("plan within that peak", lambda: planned(size, mesh, within))
    add("plan within half of FSDP2's", lambda: planned(size, mesh, peaks["FSDP2"] // 2))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            seconds = step.seconds()
            times[name] += [seconds] if number else []
        if rank == 0:
            print(f"round {number} of {rounds}", flush=True)
    if rank == 0:
        text = table(size, ranks, rounds, times, peaks, notes)
        Path(folder, "table.md").write_text(text, encoding="utf-8")
    torch.distributed.destroy_process_group()


def table(
    size: Size,
    ranks: int,
    rounds: int,
    times: dict[str, list[float]],
    peaks: dict[str, int],
    notes: list[str],
) -> str:
    """The measured figures, as a page."""
    first = times["FSDP2"]
    lines = [
        "# Sharded steps beside FSDP2",
        "",
        f"`python -m benchmarks.sharded --ranks {ranks} --layers {size.layers} --width "
        f"{size.width} --rounds {rounds}`: a GPT-2 of {size.layers} layers of {size.width}, "
        f"{BATCH} x {TOKENS} tokens on each of {ranks} gloo processes of one thread; torch "
        f"{torch.__version__}. Medians of {rounds} interleaved rounds; the ratio is the median of "
        "each round's.",
        "",
        "| | peak of a rank, MiB | step, ms | ratio to FSDP2 |",
        "|---|---|---|---|",
    ]
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
        median_ms = 1e3 * statistics.median(seconds)
        lines.append(f"| {name} | {peaks[name] / MIB:.1f} | {median_ms:.0f} | {ratio:.3f} |")
    return "\n".join([*lines, "", *notes, ""]).rstrip() + "\n"


def main() -> int:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the table there; else print it")
    options = parser.parse_args()
    size = Size(options.layers, options.width)
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, f"{folder}/store", folder, size, options.rounds)
        torch.multiprocessing.start_processes(
            measure, given, nprocs=options.ranks, start_method="spawn"
        )
        text = Path(folder, "table.md").read_text(encoding="utf-8")
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

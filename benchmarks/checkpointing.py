"""memopt's Rotor against per-block checkpointing, at the same measured peak, interleaved.

    .venv/bin/python -m benchmarks.checkpointing [--rounds 7] [--threads 2] [--only gpt2|resnet50]

GPT-2 (12 layers, d = 256, batch 4 x 128) against Hugging Face's gradient checkpointing, and
ResNet-50 against the best `checkpoint_sequential`. Peaks exclude what is resident.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

import memopt
from benchmarks.losses import WithLoss
from benchmarks.steps import Step, interleaved, peak_of, ratio
from memopt.plan import Plan
from tests.zoo import torchvision_shim

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contest:
    """A model with its inputs, and other people's ways to train it in less memory."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor] | tuple[Tensor, ...]
    peers: Mapping[str, Step]

    def eager(self) -> None:
        run(self.module, self.inputs)


def run(module: nn.Module, inputs: dict[str, Tensor] | tuple[Tensor, ...]) -> None:
    """One forward, loss and backward."""
    loss = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    loss.backward()


def gpt2(vocabulary: int) -> Contest:
    """GPT-2 with 12 layers, d = 256, batch 4 x 128; the peer checkpoints every block."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12,
        n_embd=256,
        n_head=8,
        n_positions=128,
        vocab_size=vocabulary,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, vocabulary, (4, 128))

    def loss(output: object) -> Tensor:
        logits = output.logits[:, :-1]  # type: ignore[attr-defined]  # a ModelOutput
        return functional.cross_entropy(logits.reshape(-1, vocabulary), ids[:, 1:].reshape(-1))

    module, inputs = WithLoss(model, loss), {"input_ids": ids}

    def hugging_face() -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            run(module, inputs)
        finally:
            model.gradient_checkpointing_disable()

    name = f"GPT-2, vocabulary {vocabulary}"
    return Contest(name, module, inputs, {"Hugging Face per block": hugging_face})


def resnet50(batch: int, size: int) -> Contest:
    """ResNet-50; the peers are checkpoint_sequential over its blocks with 2 to 8 segments."""
    torchvision_shim.declare_missing_operators()
    from torchvision import models

    torch.manual_seed(0)
    model = models.resnet50()
    images, classes = torch.randn(batch, 3, size, size), torch.arange(batch)
    # One module: a segment must not start at the stem's in-place ReLU, which overwrites its input.
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    layers = nn.Sequential(stem, *blocks, model.avgpool, nn.Flatten(1), model.fc)
    module = WithLoss(layers, lambda logits: functional.cross_entropy(logits, classes))

    def segmented(count: int) -> Callable[[], None]:
        def step() -> None:
            output = checkpoint_sequential(layers, count, images, use_reentrant=False)
            functional.cross_entropy(output, classes).backward()

        return step

    peers = {f"checkpoint_sequential {k}": segmented(k) for k in range(2, 9)}
    return Contest(f"ResNet-50, {batch} x {size}", module, (images,), peers)


def plan_at(first: Plan, contest: Contest, peak_bytes: int) -> Step:
    """Steps under Rotor's plan for a peak of `peak_bytes` above the resident bytes."""
    budget = first.resident_bytes + peak_bytes
    plan = memopt.plan(first.profiled, budget=budget, strategy="rotor", progress=False)
    planned = plan.apply(contest.module)
    return lambda: run(planned, contest.inputs)


def main() -> None:
    """Print one table per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("gpt2", "resnet50"), default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only != "resnet50":
        report(gpt2(1000), options.rounds)
        report(gpt2(50257), options.rounds)
    if options.only != "gpt2":
        report(resnet50(8, 128), options.rounds)


def report(contest: Contest, rounds: int) -> None:
    """Plan, measure and print one contest."""
    first = memopt.plan(contest.module, contest.inputs, strategy="store-all", progress=False)
    store_all = first.apply(contest.module)
    steps: dict[str, Step] = {"eager": contest.eager}
    steps["memopt store-all"] = lambda: run(store_all, contest.inputs)
    for peer, step in contest.peers.items():
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
    for peer in contest.peers:
        ours = f"memopt at the peak of {peer}"
        if ours in steps:
            print(f"{ours}: {ratio(times, ours, peer):.3f} x its time")


if __name__ == "__main__":
    main()

"""Other people's ways to train in less memory, each as one training step of a contest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.shapes import Contest
from benchmarks.steps import Step


@contextmanager
def _checkpointed(blocks: tuple[nn.Module, ...]) -> Iterator[None]:
    """Every block's forward runs under a checkpoint of its own."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    originals = [block.forward for block in blocks]
    try:
        for block, forward in zip(blocks, originals, strict=True):
            block.forward = wrapped(forward)
        yield
    finally:
        for block in blocks:
            del block.forward


def per_block(contest: Contest) -> Step:
    """`torch.utils.checkpoint` around every block."""

    def step() -> None:
        with _checkpointed(contest.blocks):
            contest.step()

    return step


def hugging_face(contest: Contest) -> Step:
    """`gradient_checkpointing_enable`."""
    model: Any = contest.model

    def step() -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            contest.step()
        finally:
            model.gradient_checkpointing_disable()

    return step


def segmented(contest: Contest, count: int) -> Step:
    """`checkpoint_sequential` with `count` segments."""
    sequence = contest.sequence
    assert sequence is not None
    assert isinstance(contest.inputs, tuple)
    (images,) = contest.inputs

    def step() -> None:
        torch.manual_seed(0)
        contest.module.loss(
            checkpoint_sequential(sequence, count, images, use_reentrant=False)
        ).backward()

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


def offloaded(contest: Contest) -> Step:
    """`save_on_cpu`: every saved tensor to pinned host memory (meaningful on CUDA only)."""

    def step() -> None:
        with save_on_cpu(pin_memory=True):
            contest.step()

    return step


def eager_peers(contest: Contest, segments: Sequence[int]) -> dict[str, Step]:
    """Give the peers that run eager kernels, by name."""
    peers: dict[str, Step] = {"checkpoint per block": per_block(contest)}
    if hasattr(contest.model, "gradient_checkpointing_enable"):
        peers["Hugging Face checkpointing"] = hugging_face(contest)
    if contest.sequence is not None:
        for count in segments:
            peers[f"checkpoint_sequential {count}"] = segmented(contest, count)
    if next(contest.model.parameters()).is_cuda:
        peers["save_on_cpu"] = offloaded(contest)
    return peers

"""Other people's ways to train in less memory, each as one training step of a contest, and whether
a way gives eager's gradients and buffers, after one step from one state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.shapes import Contest
from benchmarks.steps import Step, clear, difference, gradients


@contextmanager
def _checkpointed(blocks: tuple[nn.Module, ...]) -> Iterator[None]:
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

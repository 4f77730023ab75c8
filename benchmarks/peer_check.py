"""Whether a way to train gives eager's gradients and buffers, after one step from one state."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import Contest
from benchmarks.steps import Step, clear


@dataclass(frozen=True)
class Outcome:
    """Gradients and buffers after one step."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def outcome(contest: Contest, step: Step) -> Outcome:
    """One step's gradients and buffers; the model's state is put back."""
    state = copy.deepcopy(contest.model.state_dict())
    clear(contest.model)
    step()
    found = Outcome(
        {n: p.grad.clone() for n, p in contest.model.named_parameters() if p.grad is not None},
        {n: b.clone() for n, b in contest.model.named_buffers()},
    )
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
    return max(_worst(expected.gradients, one.gradients) for one in found)


def verdict(expected: Outcome, found: Outcome, noise: float = 0.0) -> str:
    """ "equal" bit for bit; "close" within 1e-3 of each tensor's largest value (gradients: or ten
    times the model's `rounding`); or what is wrong."""
    wrong = []
    exact = True
    for name, ours, theirs, tolerance in (
        ("gradients", expected.gradients, found.gradients, max(1e-3, 10 * noise)),
        ("buffers", expected.buffers, found.buffers, 1e-3),
    ):
        if ours.keys() != theirs.keys():
            wrong.append(f"{name} missing")
            continue
        exact &= all(torch.equal(ours[key], theirs[key]) for key in ours)
        worst = _worst(ours, theirs)
        if worst > tolerance:
            wrong.append(f"{name} off by {worst:.2g}")
    return ", ".join(wrong) or ("equal" if exact else "close")


def _worst(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    largest = max((float(value.double().abs().max()) for value in expected.values()), default=0.0)
    return max((_distance(expected[key], found[key], largest) for key in expected), default=0.0)


def _distance(expected: Tensor, found: Tensor, largest: float) -> float:
    """Largest difference, in units of the expected tensor's largest value.

    Gradients that are zero but for rounding (a bias before a batch norm) are measured in units of
    a thousandth of the largest value of all tensors.
    """
    difference = float((expected.double() - found.double()).abs().max())
    scale = max(float(expected.double().abs().max()), largest / 1000)
    return difference / scale if scale else difference

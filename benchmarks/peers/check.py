"""Whether a way to train gives eager's gradients and buffers, after one step from one state."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.contests import Contest
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


def verdict(expected: Outcome, found: Outcome, tolerance: float = 1e-3) -> str:
    """ "equal" bit for bit; "close" within the tolerance of each tensor's largest value; or what
    is wrong."""
    wrong = []
    exact = True
    for name, ours, theirs in (
        ("gradients", expected.gradients, found.gradients),
        ("buffers", expected.buffers, found.buffers),
    ):
        if ours.keys() != theirs.keys():
            wrong.append(f"{name} missing")
            continue
        exact &= all(torch.equal(ours[key], theirs[key]) for key in ours)
        largest = max((float(value.double().abs().max()) for value in ours.values()), default=0.0)
        worst = max((_distance(ours[key], theirs[key], largest) for key in ours), default=0.0)
        if worst > tolerance:
            wrong.append(f"{name} off by {worst:.2g}")
    return ", ".join(wrong) or ("equal" if exact else "close")


def _distance(expected: Tensor, found: Tensor, largest: float) -> float:
    """Largest difference, in units of the expected tensor's largest value.

    Gradients that are zero but for rounding (a bias before a batch norm) are measured in units of
    a thousandth of the largest value of all tensors.
    """
    difference = float((expected.double() - found.double()).abs().max())
    scale = max(float(expected.double().abs().max()), largest / 1000)
    return difference / scale if scale else difference

"""Optimizer state: names by hand, torch's optimizers by what they really allocate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from memopt.step.optimizer_state import optimizer_state, state_sizes


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.zeros(100, 100, dtype=dtype)),
        torch.nn.Parameter(torch.zeros(100, dtype=dtype)),
        torch.nn.Parameter(torch.zeros(7, dtype=dtype), requires_grad=False),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", 0),
        ("sgd-momentum", 2 * 10100),
        ("adam", 4 * 10100),
        ("AdamW", 4 * 10100),
        ("adamw-fp32", 12 * 10100),
        # Below 4096 elements the moments stay fp32.
        ("adamw-8bit", 2 * (10000 + 4 * 40) + 8 * 100),
    ],
)
def test_bytes_by_name(name: str, expected: int) -> None:
    state = optimizer_state(name, parameters())
    assert state.bytes_total == expected == sum(size for _, size in state.parts)


def test_fp32_parameters_need_no_master_copy() -> None:
    assert optimizer_state("adamw-fp32", parameters(torch.float32)).bytes_total == 8 * 10100


def test_blocks_and_tied_parameters() -> None:
    one = torch.nn.Parameter(torch.zeros(10))
    assert optimizer_state("sgd-momentum", [one, one], block_bytes=512).bytes_total == 512


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.Adadelta(p),
    ],
    ids=[
        "sgd",
        "momentum",
        "amsgrad",
        "adamw",
        "rmsprop",
        "adagrad",
        "nadam",
        "adamax",
        "adadelta",
    ],
)
def test_instances_before_and_after_a_step(make) -> None:
    held = [p for p in parameters(torch.float32) if p.requires_grad]
    optimizer = make(held)
    before = optimizer_state(optimizer, held).bytes_total
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)  # the counts of steps, too, which lie there
    ]
    assert before == sum(t.nbytes for t in tensors)
    assert optimizer_state(optimizer, held).bytes_total == before


def test_state_in_lists_and_in_objects_counts() -> None:
    """LBFGS keeps its history in lists, GaLore its projections in objects."""
    held = [torch.nn.Parameter(torch.ones(100, 100))]
    optimizer = torch.optim.LBFGS(held, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = held[0].square().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[held[0]]
    leaves = pytree.tree_leaves(dict(state))
    total = sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor))
    assert total > 4 * held[0].nbytes
    assert optimizer_state(optimizer, held).bytes_total == total
    state["projector"] = SimpleNamespace(matrix=torch.ones(10, 10), rank=10)
    assert optimizer_state(optimizer, held).bytes_total == total + 400


def test_unknown_optimizers_are_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown optimizer 'lion'; memopt knows sgd"):
        optimizer_state("lion", parameters())
    held = parameters()
    with pytest.raises(ValueError, match="run one step before planning"):
        optimizer_state(torch.optim.Rprop(held), held)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_state_of_a_number_counts_the_same_before_and_after_a_step(kind: Any) -> None:
    number = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = kind([number], 0.1)
    before = state_sizes(optimizer, optimizer.param_groups[0], number)
    number.grad = torch.ones_like(number)
    optimizer.step()
    assert state_sizes(optimizer, optimizer.param_groups[0], number) == before


def test_counts_of_steps_are_charged_where_they_lie() -> None:
    """On an accelerator a fused optimizer's take a block each; others' stay on the CPU."""
    held = [torch.nn.Parameter(torch.empty(8, device="meta"))]
    for options, counts in (({"fused": True}, 1), ({"capturable": True}, 1), ({}, 0)):
        optimizer = torch.optim.AdamW(held, **options)
        state = optimizer_state(optimizer, held, block_bytes=512)
        assert (state.bytes_total, state.count_bytes) == (512 * (2 + counts), 512 * counts)
